"""Apps for these tests are those of the engine's."""

from tests.engine.conftest import make_app

__all__ = ["make_app"]
