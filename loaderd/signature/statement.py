"""The inside of `model.sig`: the in-toto statement that names every file of a folder and its digest.

Source: predicate `https://model_signing/signature/v1.0` as model-signing 1.1 writes it.  The subject's
digest is the SHA-256 of the raw digests of all resources, in the order in which they are listed.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from hashlib import sha256
from pathlib import PurePosixPath
from types import MappingProxyType

from loaderd.checkpoint.names import ASSET_FILES, INDEX_FILE, SEAL_FILE, SIGNATURE_FILE, is_shard_name, shown
from loaderd.signature.bundle import json_object, members, refusal
from shared.digest import digest_bytes
from shared.ids import Digest, is_digest

STATEMENT_TYPE = "https://in-toto.io/Statement/v1"
PREDICATE_TYPE = "https://model_signing/signature/v1.0"

ALWAYS_IGNORED = frozenset({SIGNATURE_FILE, ".git", ".gitattributes", ".github", ".gitignore"})
"""What the reference tool leaves out unless it is told otherwise; nothing here is ever loaded."""

MAX_RESOURCES = 65_536
MAX_PATH_CHARS = 4096


@dataclass(frozen=True, slots=True)
class Statement:
    """What a signer says about a folder: the flat SHA-256 of each file, by relative path."""

    subject: str  # the folder's name when it was signed; it decides nothing
    files: Mapping[str, Digest]
    ignored: frozenset[str] = ALWAYS_IGNORED  # paths that are not covered, nor is what lies below them
    follows_symlinks: bool = False  # whether the signer read through symlinks

    def is_ignored(self, path: str) -> bool:
        """Whether the signature leaves out `path`, or a folder that it lies in."""
        return is_below(path, self.ignored)


def is_below(path: str, ignored: frozenset[str]) -> bool:
    """Whether `path` is one of `ignored`, or lies in one."""
    if path in ignored:
        return True
    return any(str(parent) in ignored for parent in PurePosixPath(path).parents)


def encode_statement(statement: Statement) -> bytes:
    """The payload to sign: resources in the order of their path's components, as the reference has them."""
    paths = sorted(statement.files, key=lambda path: PurePosixPath(path).parts)
    document = {
        "_type": STATEMENT_TYPE,
        "subject": [
            {
                "name": statement.subject,
                "digest": {"sha256": _root(statement.files[path] for path in paths)},
            }
        ],
        "predicateType": PREDICATE_TYPE,
        "predicate": {
            "serialization": {
                "method": "files",
                "hash_type": "sha256",
                "allow_symlinks": statement.follows_symlinks,
                "ignore_paths": sorted(statement.ignored),
            },
            "resources": [
                {"name": path, "algorithm": "sha256", "digest": _hex(statement.files[path])} for path in paths
            ],
        },
    }
    return json.dumps(document, separators=(",", ":")).encode("ascii")


def read_statement(payload: bytes) -> Statement:
    """Parse a payload whose signature was checked.

    Raises SignatureRefused if it is malformed, contradicts itself, is of a kind that this build does
    not read, or leaves out a file that would be loaded.
    """
    document = members(
        json_object(payload, entries=2 * MAX_RESOURCES),
        "the statement",
        required=("_type", "subject", "predicateType", "predicate"),
    )
    if document["_type"] != STATEMENT_TYPE or document["predicateType"] != PREDICATE_TYPE:
        raise refusal(
            f"states {_show(document['predicateType'])} in {_show(document['_type'])}, this build reads "
            f"{PREDICATE_TYPE} in {STATEMENT_TYPE}"
        )
    predicate = document["predicate"]
    # Whatever else a predicate holds is to be ignored: version 1.0 says so.
    if not isinstance(predicate, dict) or not {"serialization", "resources"} <= predicate.keys():
        raise refusal("the predicate lacks 'serialization' or 'resources'")
    ignored, follows_symlinks = _serialization(predicate["serialization"])
    files = _resources(predicate["resources"])
    subject = _subject(document["subject"], _root(files.values()))
    return Statement(subject, MappingProxyType(files), ignored, follows_symlinks)


def _serialization(value: object) -> tuple[frozenset[str], bool]:
    if not isinstance(value, dict):
        raise refusal("'serialization' is not an object")
    if value.get("method") != "files" or value.get("hash_type") != "sha256":
        raise refusal(
            f"covers {_show(value.get('method'))} by {_show(value.get('hash_type'))}; only 'files' by "
            "'sha256' are accepted"
        )
    fields = members(
        value,
        "'serialization'",
        required=("method", "hash_type"),
        optional=("allow_symlinks", "ignore_paths"),
    )
    follows_symlinks, paths = fields.get("allow_symlinks", False), fields.get("ignore_paths", [])
    if not isinstance(follows_symlinks, bool) or not isinstance(paths, list):
        raise refusal("'allow_symlinks' or 'ignore_paths' is of the wrong type")
    if len(paths) > MAX_RESOURCES:
        raise refusal(f"leaves out {len(paths)} paths, at most {MAX_RESOURCES} are allowed")
    ignored = {_path(path, "leaves out") for path in paths}
    for path in sorted(ignored):
        if path in ASSET_FILES or path in (INDEX_FILE, SEAL_FILE) or is_shard_name(path):
            raise refusal(f"leaves out {shown(path)!r}, which would be loaded")
    return ALWAYS_IGNORED | ignored, follows_symlinks


def _resources(value: object) -> dict[str, Digest]:
    if not isinstance(value, list) or not 0 < len(value) <= MAX_RESOURCES:
        raise refusal(f"'resources' is not a list of 1 to {MAX_RESOURCES} files")
    files: dict[str, Digest] = {}
    for resource in value:
        fields = members(resource, "a resource", required=("name", "algorithm", "digest"))
        path = _path(fields["name"], "names")
        if path in files:
            raise refusal(f"names {shown(path)!r} twice")
        digest = f"sha256:{fields['digest']}"
        if fields["algorithm"] != "sha256" or not isinstance(fields["digest"], str) or not is_digest(digest):
            raise refusal(f"has for {shown(path)!r} no digest of 64 hex digits by 'sha256'")
        files[path] = Digest(digest)
    return files


def _subject(value: object, expected: str) -> str:
    if not isinstance(value, list) or len(value) != 1:
        raise refusal("does not have exactly one subject")
    fields = members(value[0], "the subject", required=("name", "digest"))
    name, digest = fields["name"], members(fields["digest"], "the subject's digest", required=("sha256",))
    if not isinstance(name, str):
        raise refusal("the subject's name is not text")
    if digest["sha256"] != expected:
        raise refusal(
            f"contradicts itself: the subject's digest is {_show(digest['sha256'])}, its resources give "
            f"{expected}"
        )
    return name


def _path(value: object, verb: str) -> str:
    """A relative path in its one spelling, below the folder."""
    if not isinstance(value, str) or not 0 < len(value) <= MAX_PATH_CHARS:
        raise refusal(f"{verb} something that is not a path of 1 to {MAX_PATH_CHARS} characters")
    parts = value.split("/")
    if "\0" in value or any(part in ("", ".", "..") for part in parts):
        raise refusal(f"{verb} {shown(value)!r}, which is not a plain path below the folder")
    return value


def _root(digests: Iterable[Digest]) -> str:
    state = sha256()
    for digest in digests:
        state.update(digest_bytes(digest))
    return state.hexdigest()


def _hex(digest: Digest) -> str:
    return digest.removeprefix("sha256:")


def _show(value: object) -> str:
    return shown(repr(value)[:100])
