"""What routes are given: the store, the settings, a parsed query."""

from __future__ import annotations

from typing import Annotated

from fastapi import Depends, Request

from hp_tool.domain.ports import Store
from service.settings import Settings


def get_settings(request: Request) -> Settings:
    settings: Settings = request.app.state.settings
    return settings


def get_store(request: Request) -> Store:
    store: Store = request.app.state.store
    return store


SettingsDep = Annotated[Settings, Depends(get_settings)]
StoreDep = Annotated[Store, Depends(get_store)]
