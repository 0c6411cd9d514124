"""Signed webhooks of ended searches and watched jobs (https://www.standardwebhooks.com)."""

from service.webhooks.signing import verify

__all__ = ["verify"]
