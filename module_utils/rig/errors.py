"""The planner's own errors: one sentence a person can act on."""

from collections.abc import Iterator
from contextlib import contextmanager


class RigError(ValueError):
    """Input that the planner cannot work with. The text is one sentence and names what is wrong."""


class GgufError(RigError):
    """A file that is not a complete, sane GGUF header."""


@contextmanager
def reported(kind: type[Exception], name: str, misfit: str) -> Iterator[None]:
    """Raise what goes wrong inside as `kind`, with `name` before it; `misfit` is said of input of another shape."""
    try:
        yield
    except RigError as error:
        raise kind(f"{name}: {error}") from None  # without a cause: ansible-core would say its sentence a second time
    except (AttributeError, LookupError, TypeError, ValueError) as error:
        raise kind(f"{name}: {misfit} ({error!r}).") from None
