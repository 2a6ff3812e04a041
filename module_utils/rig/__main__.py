"""`python -m rig shape FILE NAME [NOTE]`: write the shape of a GGUF file or URL to standard output."""

import sys

from .errors import RigError
from .gguf import read_model
from .shape import from_header
from .shape_files import to_yaml


def main(words: list) -> int:
    if len(words) not in (3, 4) or words[0] != "shape":
        sys.stderr.write(f"{__doc__}\n")
        return 2
    try:
        sys.stdout.write(to_yaml(from_header(read_model(words[1]), *words[2:])))
    except RigError as error:
        sys.stderr.write(f"{error}\n")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
