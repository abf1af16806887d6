"""A small hub on this machine: what huggingface_hub asks of the real one for a snapshot, over HTTP."""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import unquote, urlparse


@dataclass
class Repository:
    """One repository: its files by path, its commits by revision, and how it treats who asks.

    Attributes:
        breaks: paths of which the next download ends half-way; each breaks once.
    """

    files: dict[str, bytes]
    revisions: dict[str, str] = field(default_factory=lambda: {"main": "a" * 40})
    gated: bool = False
    breaks: set[str] = field(default_factory=set)


@dataclass
class TinyHub:
    """What it holds, and what it has been asked."""

    repositories: dict[str, Repository] = field(default_factory=dict)
    served: list[tuple[str, str | None]] = field(default_factory=list)
    url: str = ""

    @property
    def downloads(self) -> set[str]:
        """Paths of all files whose contents were sent."""
        return {path for path, _ in self.served}


@contextmanager
def tiny_hub() -> Iterator[TinyHub]:
    """A hub that answers at ``url`` for as long as the context lasts."""
    hub = TinyHub()
    server = ThreadingHTTPServer(("127.0.0.1", 0), _handler(hub))
    hub.url = f"http://127.0.0.1:{server.server_address[1]}"
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def _handler(hub: TinyHub) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def log_message(self, format: str, *args: Any) -> None:
            """Silent."""

        def do_HEAD(self) -> None:
            self._answer(body=False)

        def do_GET(self) -> None:
            self._answer(body=True)

        def _answer(self, *, body: bool) -> None:
            parts = [unquote(part) for part in urlparse(self.path).path.strip("/").split("/")]
            api = parts[:2] == ["api", "models"]
            parts = parts[2:] if api else parts
            repository = hub.repositories.get("/".join(parts[:2]))
            if repository is None:
                return self._error(404, "RepoNotFound")
            verb, revision, rest = parts[2], parts[3] if len(parts) > 3 else "main", "/".join(parts[4:])
            commit = repository.revisions.get(revision, revision if revision in repository.revisions.values() else "")
            if not commit:
                return self._error(404, "RevisionNotFound")
            if api and verb == "revision":
                return self._json({"id": "/".join(parts[:2]), "sha": commit, "siblings": [], "tags": []})
            if api and verb == "tree":
                return self._json([_entry(path, content) for path, content in repository.files.items()])
            if repository.gated:
                return self._error(403, "GatedRepo")
            if rest not in repository.files:
                return self._error(404, "EntryNotFound")
            self._file(repository, rest, commit, body=body)

        def _file(self, repository: Repository, path: str, commit: str, *, body: bool) -> None:
            content = repository.files[path]
            asked = self.headers.get("Range")
            start = int(asked.removeprefix("bytes=").split("-")[0]) if asked and body else 0
            self.send_response(206 if start else 200)
            if start:
                self.send_header("Content-Range", f"bytes {start}-{len(content) - 1}/{len(content)}")
            self.send_header("ETag", f'"{hashlib.sha1(content).hexdigest()}"')
            self.send_header("X-Repo-Commit", commit)
            self.send_header("Accept-Ranges", "bytes")
            self.send_header("Content-Length", str(len(content) - start))
            self.end_headers()
            if not body:
                return
            hub.served.append((path, asked))
            if path in repository.breaks:
                repository.breaks.discard(path)
                self.wfile.write(content[start : start + (len(content) - start) // 2])
                self.wfile.flush()
                self.close_connection = True
                return
            self.wfile.write(content[start:])

        def _json(self, value: Any) -> None:
            content = json.dumps(value).encode()
            self.send_response(200)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

        def _error(self, status: int, code: str) -> None:
            self.send_response(status)
            self.send_header("X-Error-Code", code)
            self.send_header("Content-Length", "0")
            self.end_headers()

    return Handler


def _entry(path: str, content: bytes) -> dict[str, Any]:
    return {"type": "file", "path": path, "size": len(content), "oid": hashlib.sha1(content).hexdigest()}
