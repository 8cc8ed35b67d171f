"""Regenerate the Python stubs of the wire messages, or check that they are fresh.

    python protos/generate.py            write the stubs beside their .proto
    python protos/generate.py --check    exit with 1 when a committed stub differs

Needs the grpcio-tools release pinned in pyproject.toml: generated code refuses to run with an older
runtime than its generator.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path

PROTO_ROOT = Path(__file__).resolve().parent
STUB_SUFFIXES = ("_pb2.py", "_pb2.pyi", "_pb2_grpc.py")


def generate(out_dir: Path) -> list[Path]:
    """Write the stubs of every .proto under `out_dir` and return their paths relative to it."""
    import grpc_tools
    from grpc_tools import protoc

    protos = sorted(PROTO_ROOT.rglob("*.proto"))
    well_known = Path(grpc_tools.__file__).parent / "_proto"
    status = protoc.main(
        [
            "protoc",
            f"-I{PROTO_ROOT}",
            f"-I{well_known}",
            f"--python_out={out_dir}",
            f"--pyi_out={out_dir}",
            f"--grpc_python_out={out_dir}",
            *map(str, protos),
        ]
    )
    if status != 0:
        raise SystemExit(f"protoc failed with status {status}")
    stems = [p.relative_to(PROTO_ROOT).with_suffix("") for p in protos]
    return [stem.with_name(stem.name + suffix) for stem in stems for suffix in STUB_SUFFIXES]


def stale_stubs() -> list[Path]:
    """Return the committed stubs that differ from freshly generated ones."""
    with tempfile.TemporaryDirectory() as folder:
        fresh = Path(folder)
        return [
            path
            for path in generate(fresh)
            if not (PROTO_ROOT / path).is_file()
            or (PROTO_ROOT / path).read_bytes() != (fresh / path).read_bytes()
        ]


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description="Regenerate the stubs of the wire messages.")
    parser.add_argument("--check", action="store_true", help="compare only; exit 1 if stale")
    if not parser.parse_args().check:
        generate(PROTO_ROOT)
        return
    if stale := stale_stubs():
        sys.exit(f"stale stubs: {', '.join(map(str, stale))}; run python protos/generate.py")


if __name__ == "__main__":
    main()
