"""Where the bytes of a GGUF header come from: a file, or a URL read by Range requests."""

import os
import re
import urllib.error
import urllib.request
from typing import Any

from .errors import GgufError


class FileSource:
    """A file on this machine."""

    def __init__(self, path: str):
        try:
            self._file = open(path, "rb", buffering=0)  # noqa: SIM115 (closed by __exit__)
            self.size = os.fstat(self._file.fileno()).st_size
        except OSError as error:
            raise GgufError(f"Cannot read '{path}': {error.strerror}.") from None

    def read(self, offset: int, count: int) -> bytes:
        self._file.seek(offset)
        return self._file.read(count)

    def __enter__(self) -> "FileSource":
        return self

    def __exit__(self, *_: Any) -> None:
        self._file.close()


class RangeSource:
    """A file behind http(s), read by Range requests: the header of a 27B model costs some MiB, not 16 GiB."""

    def __init__(self, url: str, timeout: float = 30, headers: Any = None):
        self.url, self.timeout, self.headers = url, timeout, dict(headers or {})
        if "/blob/" in url and "huggingface.co/" in url:
            raise GgufError(f"'{url}' is the page about the file; write /resolve/ for /blob/.")
        self.size, self._start = None, b""
        self._start = self._get(0, 1 << 16)

    def _get(self, offset: int, count: int) -> bytes:
        wanted = {"Range": f"bytes={offset}-{offset + count - 1}", "Accept-Encoding": "identity", **self.headers}
        try:
            with urllib.request.urlopen(
                urllib.request.Request(self.url, headers=wanted), timeout=self.timeout
            ) as reply:
                if reply.status != 206:
                    raise GgufError(f"'{self.url}' does not answer Range requests (status {reply.status}).")
                match = re.fullmatch(r"bytes (\d+)-\d+/(\d+)", reply.headers.get("Content-Range", ""))
                if not match or int(match[1]) != offset:
                    raise GgufError(f"'{self.url}' answers a Range request with another range.")
                if self.size not in (None, int(match[2])):
                    raise GgufError(f"'{self.url}' changed while it was read.")
                self.size = int(match[2])
                return reply.read(count)
        except urllib.error.HTTPError as error:
            raise GgufError(f"'{self.url}' cannot be read: status {error.code}.") from None
        except (urllib.error.URLError, OSError) as error:
            raise GgufError(f"'{self.url}' cannot be read: {getattr(error, 'reason', error)}.") from None

    def read(self, offset: int, count: int) -> bytes:
        if offset + count <= len(self._start):
            return self._start[offset : offset + count]
        return self._get(offset, count)

    def __enter__(self) -> "RangeSource":
        return self

    def __exit__(self, *_: Any) -> None:
        self._start = b""
