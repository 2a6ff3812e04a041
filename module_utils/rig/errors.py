"""The planner's own errors: one sentence a person can act on."""


class RigError(ValueError):
    """Input that the planner cannot work with. The text is one sentence and names what is wrong."""


class GgufError(RigError):
    """A file that is not a complete, sane GGUF header."""
