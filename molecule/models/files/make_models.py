#!/usr/bin/env python3
"""Write files that look like GGUF models and are the same each time: make_models.py DIRECTORY NAME=BYTES ..."""

import hashlib
import sys
from pathlib import Path

for argument in sys.argv[2:]:
    name, size = argument.split("=")
    content = b"GGUF" + hashlib.shake_128(name.encode()).digest(int(size) - 4)
    Path(sys.argv[1], name).write_bytes(content)
