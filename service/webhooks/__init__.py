"""Signed webhooks for finished searches and watched jobs (https://www.standardwebhooks.com)."""

from service.webhooks.signing import verify

__all__ = ["verify"]
