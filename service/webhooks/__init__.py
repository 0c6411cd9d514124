"""Signed webhooks: a service tells a URL that a search has ended
(https://www.standardwebhooks.com).
"""

from service.webhooks.signing import verify

__all__ = ["verify"]
