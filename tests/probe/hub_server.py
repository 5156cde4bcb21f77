"""A model hub on this machine: as much of its protocol as the probe speaks, over one folder of real files."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

COMMIT = "0123456789abcdef0123456789abcdef01234567"


class Hub(BaseHTTPRequestHandler):
    """Serves the class's `folder` as the branch main of acme/tiny; acme/gated is gated, all else is unknown."""

    protocol_version = "HTTP/1.1"
    folder: Path
    sent: list[tuple[str, int]]

    def do_GET(self) -> None:
        path = self.path.partition("?")[0]
        if "acme/gated" in path:
            self.refuse(403, "GatedRepo")
        elif "acme/tiny" not in path:
            self.refuse(404, "RepoNotFound")
        elif "/main" not in path and COMMIT not in path:
            self.refuse(404, "RevisionNotFound")
        elif path.startswith("/api/"):
            self.answer(200, json.dumps(self.listing(tree="/tree/" in path)).encode())
        else:
            self.send_file(self.folder / path.rpartition("/")[2])

    do_HEAD = do_GET

    def listing(self, tree: bool) -> object:
        sizes = {file.name: file.stat().st_size for file in sorted(self.folder.iterdir())}
        if tree:
            return [{"type": "file", "path": name, "size": size, "oid": name} for name, size in sizes.items()]
        files = [{"rfilename": name, "size": size} for name, size in sizes.items()]
        return {"id": "acme/tiny", "sha": COMMIT, "siblings": files}

    def send_file(self, file: Path) -> None:
        if not file.is_file():
            return self.refuse(404, "EntryNotFound")
        content = file.read_bytes()
        if "Range" not in self.headers:
            return self.answer(200, content, ETag=f'"{file.name}"')
        begin, _, end = self.headers["Range"].removeprefix("bytes=").partition("-")
        part = content[int(begin) : int(end) + 1 if end else None]
        where = f"bytes {begin}-{int(begin) + len(part) - 1}/{len(content)}"
        return self.answer(206, part, ETag=f'"{file.name}"', Content_Range=where)

    def refuse(self, status: int, code: str) -> None:
        self.answer(status, b"{}", X_Error_Code=code, X_Error_Message=code)

    def answer(self, status: int, body: bytes, **headers: str) -> None:
        self.send_response(status)
        for name, value in {"Content_Length": str(len(body)), "X_Repo_Commit": COMMIT, **headers}.items():
            self.send_header(name.replace("_", "-"), value)
        self.end_headers()
        if self.command == "GET":
            self.sent.append((self.path, len(body)))
            self.wfile.write(body)

    def log_message(self, *args: object) -> None:
        pass


@contextmanager
def serve_hub(folder: Path) -> Iterator[tuple[str, list[tuple[str, int]]]]:
    """Yields the endpoint, and a list that takes (path, bytes) of every content sent."""
    handler = type("HubOfFolder", (Hub,), {"folder": folder, "sent": []})
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}", handler.sent
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
