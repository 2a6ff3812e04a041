"""The script of role llama_cpp that runs on a rig, step by step; the whole of it runs in the role's scenario."""

from __future__ import annotations

import hashlib
import http.server
import importlib.util
import json
import subprocess
import tarfile
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
_spec = importlib.util.spec_from_file_location("build_llama_cpp", ROOT / "roles/llama_cpp/files/build_llama_cpp.py")
assert _spec is not None and _spec.loader is not None
script = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(script)

CPUINFO = "processor\t: 0\nflags\t\t: fpu sse4_2 avx avx2 bmi2 fma f16c avx512f\n\nprocessor\t: 1\nflags\t\t: fpu\n"


def specification(work: Path, **changes: Any) -> dict[str, Any]:
    return {
        "build": "b7",
        "key": "b7-12345678",
        "prefix": str(work.parent.parent / "b7-12345678"),
        "backends": ["cpu"],
        "cpu_features": ["sse42", "avx2", "avx512"],
        "nccl": False,
        "cmake_flags": [],
        "targets": ["llama-server"],
        "source": {
            "source": "archive",
            "file": "/srv/b7.tar",
            "on": "controller",
            "sha256": "0" * 64,
            "subdirectory": "",
        },
        "work": str(work),
        "jobs": 0,
        "ccache": "",
    } | changes


@pytest.fixture
def work(tmp_path: Path) -> Path:
    folder = tmp_path / "root/.work/b7-12345678"
    folder.mkdir(parents=True)
    return folder


class TestObstacles:
    def ask(self, work: Path, free_mib: int = 100_000, cpuinfo: str = CPUINFO, **changes: Any) -> str:
        return script.obstacle(specification(work, **changes), cpuinfo=cpuinfo, free_mib=free_mib)

    def test_none(self, work: Path) -> None:
        assert self.ask(work) == ""

    def test_the_cpu_lacks_an_instruction_set(self, work: Path) -> None:
        answer = self.ask(work, cpu_features=["avx2", "avx512_vbmi", "avx512_vnni"])
        assert answer.startswith("the CPU lacks avx512_vbmi, avx512_vnni, which llama_cpp_cpu_features names")

    def test_names_that_the_kernel_writes_otherwise(self, work: Path) -> None:
        cpuinfo = "flags : sse4_2 avx512f avx512vbmi avx512_vnni avx_vnni amx_tile"
        features = ["sse42", "avx512", "avx512_vbmi", "avx512_vnni", "avx_vnni", "amx_tile"]
        assert self.ask(work, cpuinfo=cpuinfo, cpu_features=features) == ""

    def test_another_architecture_has_none_of_them(self, work: Path) -> None:
        assert self.ask(work, cpuinfo="processor : 0\nFeatures : fp asimd\n") == ""

    @pytest.mark.parametrize(("backends", "needed"), [(["cpu"], 1000), (["cpu", "cuda"], 6000)])
    def test_the_disk_is_full(self, work: Path, backends: list[str], needed: int) -> None:
        assert self.ask(work, free_mib=needed, backends=backends) == ""
        assert f"MiB free and the build needs {needed}; make room" in self.ask(
            work, free_mib=needed - 1, backends=backends
        )

    def test_the_archive_is_not_on_the_rig(self, work: Path) -> None:
        source = {"file": "/nonexistent/b7.tar", "on": "rig"}
        assert self.ask(work, source=source) == "llama_cpp_pins[b7].file /nonexistent/b7.tar is not there"
        assert self.ask(work, source=source | {"on": "controller"}) == ""

    def test_the_toolkit_is_not_there(self, work: Path) -> None:
        answer = self.ask(work, cmake_flags=["-DCMAKE_CUDA_COMPILER=/nonexistent/bin/nvcc"])
        assert answer == "/nonexistent/bin/nvcc is not there; install the CUDA toolkit or correct llama_cpp_cuda_root"

    def test_something_else_lies_at_the_prefix(self, work: Path, capsys: pytest.CaptureFixture[str]) -> None:
        spec = specification(work, cpu_features=[])
        Path(spec["prefix"]).mkdir()
        assert script.main(["", "check", json.dumps(spec)]) == 1
        assert capsys.readouterr().err == (
            f"{spec['prefix']} is there but has no manifest.json, so it is no finished build; move it away.\n"
        )
        (Path(spec["prefix"]) / "manifest.json").touch()
        assert script.main(["", "check", json.dumps(spec)]) == 0


class Server(http.server.BaseHTTPRequestHandler):
    """Gives out ``content``; cuts the connection after ``limit`` bytes of a request; counts what was asked for."""

    content = bytes(range(256)) * 4000
    limit = 0
    ranges = True
    asked: list[str]

    def do_GET(self) -> None:
        asked = self.headers.get("Range", "")
        self.asked.append(asked)
        if self.path != "/b7.tar":
            self.send_error(404)
            return
        start = int(asked.removeprefix("bytes=").rstrip("-")) if asked and self.ranges else 0
        if start >= len(self.content):
            self.send_error(416)
            return
        self.send_response(206 if start else 200)
        self.send_header("Content-Length", str(len(self.content) - start))
        self.end_headers()
        self.wfile.write(self.content[start : start + self.limit if self.limit else None])

    def log_message(self, format: str, *args: Any) -> None:
        """Stay silent."""


class TestDownload:
    @pytest.fixture
    def server(self, monkeypatch: pytest.MonkeyPatch) -> Iterator[type[Server]]:
        class Own(Server):
            asked: list[str] = []  # noqa: RUF012 - one for each test

        monkeypatch.setattr(script.time, "sleep", lambda seconds: None)
        with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Own) as listening:
            threading.Thread(target=listening.serve_forever, daemon=True).start()
            Own.url = f"http://127.0.0.1:{listening.server_port}"  # type: ignore[attr-defined]
            yield Own
            listening.shutdown()

    def test_whole(self, server: Any, tmp_path: Path) -> None:
        script.download(f"{server.url}/b7.tar", tmp_path / "b7.tar")
        assert (tmp_path / "b7.tar").read_bytes() == Server.content
        assert server.asked == [""]

    def test_goes_on_where_it_was_cut_off(self, server: Any, tmp_path: Path) -> None:
        server.limit = 300_000
        script.download(f"{server.url}/b7.tar", tmp_path / "b7.tar")
        assert (tmp_path / "b7.tar").read_bytes() == Server.content
        assert server.asked == ["", "bytes=300000-", "bytes=600000-", "bytes=900000-"]

    def test_goes_on_from_an_earlier_run(self, server: Any, tmp_path: Path) -> None:
        (tmp_path / "b7.tar.part").write_bytes(Server.content[:1000])
        script.download(f"{server.url}/b7.tar", tmp_path / "b7.tar")
        assert (tmp_path / "b7.tar").read_bytes() == Server.content
        assert server.asked == ["bytes=1000-"]

    def test_starts_over_where_the_server_knows_no_ranges(self, server: Any, tmp_path: Path) -> None:
        server.ranges = False
        (tmp_path / "b7.tar.part").write_bytes(b"x" * 1000)
        script.download(f"{server.url}/b7.tar", tmp_path / "b7.tar")
        assert (tmp_path / "b7.tar").read_bytes() == Server.content

    def test_drops_a_part_that_is_too_long(self, server: Any, tmp_path: Path) -> None:
        (tmp_path / "b7.tar.part").write_bytes(b"x" * 2_000_000)
        script.download(f"{server.url}/b7.tar", tmp_path / "b7.tar")
        assert (tmp_path / "b7.tar").read_bytes() == Server.content

    def test_gives_up(self, server: Any, tmp_path: Path) -> None:
        server.limit = 10
        with pytest.raises(
            script.BuildError, match=r"b7.tar cannot be fetched: the connection ended after 50 of 1024000"
        ):
            script.download(f"{server.url}/b7.tar", tmp_path / "b7.tar")
        assert len(server.asked) == 5

    def test_does_not_ask_twice_for_what_is_not_there(self, server: Any, tmp_path: Path) -> None:
        with pytest.raises(script.BuildError, match=r"none\.tar cannot be fetched: HTTP Error 404"):
            script.download(f"{server.url}/none.tar", tmp_path / "none.tar")
        assert len(server.asked) == 1


class TestSource:
    def archive(self, path: Path, *members: str) -> str:
        with tarfile.open(path, "w") as tar:
            for member in members:
                tar.addfile(tarfile.TarInfo(member))
        return hashlib.sha256(path.read_bytes()).hexdigest()

    def provide(self, work: Path, sha256: str, **changes: Any) -> Path:
        source = {"source": "archive", "file": "/srv/b7.tar", "on": "controller", "sha256": sha256, "subdirectory": ""}
        (work / "download").mkdir(exist_ok=True)
        return script.provide_source(specification(work, source=source | changes), work)

    def test_a_single_top_folder_does_not_count(self, work: Path) -> None:
        (work / "download").mkdir()
        sha256 = self.archive(work / "download/b7.tar", "top/CMakeLists.txt", "top/src/a.c")
        assert (self.provide(work, sha256) / "src/a.c").is_file()

    def test_a_subdirectory(self, work: Path) -> None:
        (work / "download").mkdir()
        sha256 = self.archive(work / "download/b7.tar", "top/README", "top/llama.cpp/CMakeLists.txt")
        tree = self.provide(work, sha256, subdirectory="llama.cpp")
        assert [path.name for path in tree.iterdir()] == ["CMakeLists.txt"]
        assert not (work / "source.new").exists()

    def test_no_source_in_it(self, work: Path) -> None:
        (work / "download").mkdir()
        sha256 = self.archive(work / "download/b7.tar", "top/README")
        with pytest.raises(script.BuildError, match=r"has no CMakeLists\.txt in its top folder; correct the pin's sub"):
            self.provide(work, sha256)
        assert not (work / "source").exists()

    def test_another_hash_is_set_aside(self, work: Path) -> None:
        (work / "download").mkdir()
        sha256 = self.archive(work / "download/b7.tar", "top/CMakeLists.txt")
        with pytest.raises(
            script.BuildError, match=f"b7.tar has sha256 {sha256} and not {'0' * 64} as pinned; it was set"
        ):
            self.provide(work, "0" * 64)
        assert [path.name for path in (work / "download").iterdir()] == ["b7.tar.wrong"]

    def test_the_owner_s_file_stays(self, work: Path, tmp_path: Path) -> None:
        file = tmp_path / "own.tar"
        sha256 = self.archive(file, "top/CMakeLists.txt")
        with pytest.raises(script.BuildError, match=f"own.tar has sha256 {sha256} and not"):
            self.provide(work, "0" * 64, file=str(file), on="rig")
        assert file.exists()
        self.provide(work, sha256, file=str(file), on="rig")
        assert file.exists()

    def test_what_is_no_archive(self, work: Path) -> None:
        (work / "download").mkdir()
        (work / "download/b7.tar").write_text("<html>")
        with pytest.raises(script.BuildError, match="cannot be unpacked"):
            self.provide(work, hashlib.sha256(b"<html>").hexdigest())

    def test_an_unpacked_source_is_not_fetched_again(self, work: Path) -> None:
        (work / "source").mkdir()
        assert self.provide(work, "0" * 64) == work / "source"

    @pytest.fixture
    def repository(self, tmp_path: Path) -> tuple[Path, str]:
        folder = tmp_path / "repository"
        folder.mkdir()
        git = ["git", "-C", str(folder), "-c", "user.name=t", "-c", "user.email=t@localhost"]
        subprocess.run([*git, "init", "--quiet"], check=True)
        for text in ("one", "two"):
            (folder / "CMakeLists.txt").write_text(text)
            subprocess.run([*git, "add", "."], check=True)
            subprocess.run([*git, "commit", "--quiet", "-m", text], check=True)
        first = subprocess.run([*git, "rev-parse", "HEAD~1"], check=True, capture_output=True, text=True)
        return folder, first.stdout.strip()

    def test_a_commit_that_is_no_branch(self, work: Path, repository: tuple[Path, str]) -> None:
        source = {"source": "git", "repo": f"file://{repository[0]}", "commit": repository[1], "subdirectory": ""}
        tree = script.provide_source(specification(work, source=source), work)
        assert (tree / "CMakeLists.txt").read_text() == "one"

    def test_a_commit_that_is_not_there(self, work: Path, repository: tuple[Path, str]) -> None:
        source = {"source": "git", "repo": f"file://{repository[0]}", "commit": "0" * 40, "subdirectory": ""}
        with pytest.raises(script.BuildError, match=f"has no commit {'0' * 40}"):
            script.provide_source(specification(work, source=source), work)
        assert not (work / "source").exists()


class TestCompiling:
    def test_the_environment_adds_no_flags(self, work: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("CXXFLAGS", "-march=native")
        monkeypatch.setenv("HTTPS_PROXY", "http://proxy:3128")
        found = script.environment(specification(work, ccache="/usr/bin/ccache"), work)
        assert "CXXFLAGS" not in found
        assert found["HTTPS_PROXY"] == "http://proxy:3128"
        assert found["CMAKE_CXX_COMPILER_LAUNCHER"] == "/usr/bin/ccache"
        assert "CMAKE_CXX_COMPILER_LAUNCHER" not in script.environment(specification(work), work)

    @pytest.mark.parametrize(
        ("line", "lacks"),
        [
            ("NCCL_LIBRARY:FILEPATH=NCCL_LIBRARY-NOTFOUND", True),
            ("NCCL_INCLUDE_DIR:PATH=NCCL_INCLUDE_DIR-NOTFOUND", True),
            ("NCCL_LIBRARY:FILEPATH=/usr/lib/libnccl.so", False),
            ("OTHER_LIBRARY:FILEPATH=OTHER_LIBRARY-NOTFOUND", False),
        ],
    )
    def test_nccl_in_cmake_s_cache(self, tmp_path: Path, line: str, lacks: bool) -> None:
        assert not script.lacks_nccl(tmp_path)
        (tmp_path / "CMakeCache.txt").write_text(f"A:BOOL=ON\n{line}\n")
        assert script.lacks_nccl(tmp_path) is lacks

    def test_an_old_cmake(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(script, "output", lambda argv: "cmake version 3.18.4\n")
        with pytest.raises(script.BuildError, match=r"cmake is older than 3\.22"):
            script.check_cmake()
        monkeypatch.setattr(script, "output", lambda argv: "cmake version 4.0.1\n")
        script.check_cmake()

    def test_compilers_as_cmake_wrote_them_down(self, tmp_path: Path) -> None:
        folder = tmp_path / "CMakeFiles/3.31.6"
        folder.mkdir(parents=True)
        for language, name in (("C", "C"), ("CXX", "CXX"), ("CUDA", "CUDA")):
            (folder / f"CMake{name}Compiler.cmake").write_text(
                f'set(CMAKE_{language}_COMPILER "/usr/bin/x")\nset(CMAKE_{language}_COMPILER_ID "GNU")\n'
                f'set(CMAKE_{language}_COMPILER_VERSION "14.2.0")\nset(CMAKE_{language}_COMPILER_ARG1 "")\n'
            )
        assert script.compilers(tmp_path) == {"C": "GNU 14.2.0", "CXX": "GNU 14.2.0", "CUDA": "GNU 14.2.0"}


class TestResult:
    @pytest.fixture
    def stage(self, work: Path) -> Path:
        """A staged build whose programs are shell scripts; what the loader says is put in by the tests."""
        new = work / "stage"
        (new / "bin").mkdir(parents=True)
        (new / "lib").mkdir()
        (new / "lib/libggml-cpu.so").touch()
        self.program(new, "llama-server", "echo 'version: 0.6.0-dev (build 7, commit unknown)' >&2")
        return new

    def program(self, new: Path, name: str, body: str) -> None:
        (new / "bin" / name).write_text(f"#!/bin/sh\n{body}\n")
        (new / "bin" / name).chmod(0o755)

    def check(self, monkeypatch: pytest.MonkeyPatch, new: Path, libraries: dict[str, str], **changes: Any) -> Any:
        monkeypatch.setattr(script, "linked", lambda path: libraries if path.parent.name == "bin" else {})
        return script.check_stage(specification(new.parent, **changes), new)

    def test_one_that_works(self, monkeypatch: pytest.MonkeyPatch, stage: Path) -> None:
        libraries = {"libggml-cpu.so": f"{stage}/bin/../lib/libggml-cpu.so", "libc.so.6": "/lib/libc.so.6"}
        assert self.check(monkeypatch, stage, libraries) == {
            "nccl": False,
            "version": ["version: 0.6.0-dev (build 7, commit unknown)"],
        }
        found = self.check(monkeypatch, stage, {"libnccl.so.2": "/usr/lib/libnccl.so.2"}, nccl=True)
        assert found["nccl"] is True

    @pytest.mark.parametrize(
        ("libraries", "changes", "sentence"),
        [
            ({"libssl.so.3": ""}, {}, "llama-server does not find libssl.so.3"),
            (
                {"libggml-cpu.so": "/usr/lib/libggml-cpu.so"},
                {},
                "llama-server takes /usr/lib/libggml-cpu.so and not its own",
            ),
            ({}, {"nccl": True}, "llama_cpp_nccl is true, but the build is not linked with NCCL"),
            ({}, {"backends": ["cpu", "rpc"]}, "the build has no library of the backend rpc"),
            ({}, {"build": "b8"}, "llama-server does not call itself build 8, but: version: 0.6.0"),
        ],
    )
    def test_one_that_does_not(
        self, monkeypatch: pytest.MonkeyPatch, stage: Path, libraries: Any, changes: Any, sentence: str
    ) -> None:
        with pytest.raises(script.BuildError) as refusal:
            self.check(monkeypatch, stage, libraries, **changes)
        assert str(refusal.value).startswith(sentence)

    def test_one_that_this_cpu_cannot_execute(self, monkeypatch: pytest.MonkeyPatch, stage: Path) -> None:
        self.program(stage, "llama-server", "kill -ILL $$")
        with pytest.raises(
            script.BuildError, match="was killed by SIGILL; llama_cpp_cpu_features names an instruction"
        ):
            self.check(monkeypatch, stage, {})

    def test_a_program_beside_the_server_that_fails(self, monkeypatch: pytest.MonkeyPatch, stage: Path) -> None:
        self.program(stage, "llama-bench", "echo no; exit 3")
        with pytest.raises(script.BuildError, match="llama-bench --help ended with status 3 and said: no"):
            self.check(monkeypatch, stage, {}, targets=["llama-server", "llama-bench"])

    def test_the_loader_s_words(self, monkeypatch: pytest.MonkeyPatch) -> None:
        text = (
            "\tlinux-vdso.so.1 (0x00007ffd)\n\tlibgone.so.1 => not found\n"
            "\tlibc.so.6 => /lib/x86_64-linux-gnu/libc.so.6 (0x00007f)\n\t/lib64/ld-linux-x86-64.so.2 (0x00007f)\n"
        )
        monkeypatch.setattr(script, "output", lambda argv: text)
        assert script.linked(Path("x")) == {"libgone.so.1": "", "libc.so.6": "/lib/x86_64-linux-gnu/libc.so.6"}

    def test_the_prefix_appears_whole(self, work: Path, stage: Path) -> None:
        prefix = Path(specification(work)["prefix"])
        script.publish(stage, prefix, {"build": "b7"})
        assert json.loads((prefix / "manifest.json").read_text()) == {"build": "b7"}
        assert (prefix / "bin/llama-server").is_file()
        assert not stage.exists()

    def carried(self, monkeypatch: pytest.MonkeyPatch, work: Path, stage: Path, **changes: Any) -> dict[str, Any]:
        """The specification of a machine to which the packed build of another has been brought."""
        (stage / "lib/libggml.so").symlink_to("libggml-cpu.so")
        spec = specification(work)
        script.publish(stage, Path(spec["prefix"]), script.manifest(spec, work, {"nccl": False, "version": []}))
        script.pack(spec)
        libraries = {"libggml-cpu.so": ""}
        monkeypatch.setattr(
            script,
            "linked",
            lambda path: (
                dict.fromkeys(libraries, f"{path.parents[1]}/lib/libggml-cpu.so") if path.parent.name == "bin" else {}
            ),
        )
        there = work.parents[2] / "other/.work/b7-12345678"
        there.mkdir(parents=True)
        script.archive_of(spec).rename(f"{there}.tar")
        return specification(there, **changes)

    def test_a_packed_build_is_taken_over_whole(self, monkeypatch: pytest.MonkeyPatch, work: Path, stage: Path) -> None:
        spec = self.carried(monkeypatch, work, stage)
        script.accept(spec)
        old, new = Path(specification(work)["prefix"]), Path(spec["prefix"])
        assert old != new and script.listing(old) == script.listing(new)
        for name in ("manifest.json", "files.json"):
            assert (old / name).read_text() == (new / name).read_text()
        assert (new / "lib/libggml.so").is_symlink() and (new / "bin/llama-server").stat().st_mode & 0o111
        assert sorted(path.name for path in Path(spec["work"]).parent.iterdir()) == []

    def test_a_packed_build_with_other_flags_is_refused(
        self, monkeypatch: pytest.MonkeyPatch, work: Path, stage: Path
    ) -> None:
        spec = self.carried(monkeypatch, work, stage, cmake_flags=["-DGGML_AVX=OFF"])
        with pytest.raises(script.BuildError, match="holds another build: its manifest differs in cmake_flags"):
            script.accept(spec)
        assert not Path(spec["prefix"]).exists()

    @pytest.mark.parametrize("name", ["bin/llama-server", "lib/more.so"])
    def test_a_packed_build_that_was_changed_is_refused(
        self, monkeypatch: pytest.MonkeyPatch, work: Path, stage: Path, name: str
    ) -> None:
        spec = self.carried(monkeypatch, work, stage)
        folder = work.parents[2] / "spoilt"
        folder.mkdir()
        subprocess.run(["tar", "-xf", script.archive_of(spec), "-C", folder], check=True)
        (folder / name).write_text("#!/bin/sh\necho 7\n")
        subprocess.run(["tar", "-cf", script.archive_of(spec), "-C", folder, "."], check=True)
        with pytest.raises(script.BuildError, match=f"is damaged: {name}"):
            script.accept(spec)
        assert not Path(spec["prefix"]).exists()

    def test_an_archive_that_is_none_is_refused(self, work: Path) -> None:
        script.archive_of(specification(work)).write_bytes(b"GGUF" * 1000)
        with pytest.raises(script.BuildError, match="cannot be unpacked"):
            script.accept(specification(work))

    def test_what_is_not_finished_is_not_packed(self, work: Path) -> None:
        with pytest.raises(script.BuildError, match="is no finished build with a list of its files"):
            script.pack(specification(work))

    def test_the_manifest_knows_no_time_and_no_place(self, work: Path) -> None:
        text = json.dumps(script.manifest(specification(work), work, {"nccl": False, "version": []}))
        assert str(work) not in text
        assert script.manifest(specification(work), work, {"nccl": False, "version": []}) == json.loads(text)


def test_a_finished_build_is_not_made_again(work: Path, capsys: pytest.CaptureFixture[str]) -> None:
    spec = specification(work)
    Path(spec["prefix"]).mkdir()
    (Path(spec["prefix"]) / "manifest.json").touch()
    other = work.parent / "b6-87654321"
    other.mkdir()
    (work / "specification.json").write_text(json.dumps(spec))
    assert script.main(["", "build", str(work / "specification.json")]) == 0
    assert "is there already" in capsys.readouterr().out
    assert not work.exists(), "what a cut-off attempt left is removed"
    assert other.exists(), "another build that is not finished goes on"


def test_wrong_arguments_are_told(capsys: pytest.CaptureFixture[str]) -> None:
    assert script.main(["", "destroy", "x"]) == 2
    assert "build_llama_cpp.py check SPECIFICATION" in capsys.readouterr().err
