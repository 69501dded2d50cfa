"""`model.sig` parsed: what the reference writes is read, everything else is refused by name."""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Callable
from typing import Any

import pytest

from loaderd.signature import bundle as bundle_module
from loaderd.signature.bundle import Envelope, encode_bundle, pre_authentication_encoding, read_bundle
from loaderd.signature.statement import ALWAYS_IGNORED, Statement, encode_statement, read_statement
from shared.digest import file_digest
from shared.errors import SignatureRefused

HINT = "ab" * 32
DIGESTS = {name: file_digest(name.encode()) for name in ("a", "b/c", "b.d")}

Change = Callable[[dict[str, Any]], object]


def encoded(change: Change | None = None) -> bytes:
    """A bundle, changed."""
    document = json.loads(encode_bundle(Envelope(b"{}", b"sig", HINT)))
    if change is not None:
        change(document)
    return json.dumps(document).encode()


def statement(change: Change | None = None) -> bytes:
    """A statement, changed."""
    document = json.loads(encode_statement(Statement("m-v1", DIGESTS)))
    if change is not None:
        change(document)
    return json.dumps(document).encode()


def material(**fields: object) -> Change:
    return lambda d: d["verificationMaterial"].update(fields)


def envelope(**fields: object) -> Change:
    return lambda d: d["dsseEnvelope"].update(fields)


def serialization(**fields: object) -> Change:
    return lambda d: d["predicate"]["serialization"].update(fields)


def first(**fields: object) -> Change:
    return lambda d: d["predicate"]["resources"][0].update(fields)


def test_the_bytes_that_are_signed() -> None:
    assert pre_authentication_encoding(b"{ }") == b"DSSEv1 28 application/vnd.in-toto+json 3 { }"


def test_a_bundle_is_read_as_it_was_written() -> None:
    written = Envelope(b'{"a": 1}', b"\x30\x00", HINT)
    assert read_bundle(encode_bundle(written)) == written
    assert read_bundle(encoded(lambda d: d["verificationMaterial"].pop("tlogEntries"))).hint == HINT
    assert read_bundle(encoded(lambda d: d["verificationMaterial"]["publicKey"].pop("hint"))).hint is None


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda d: d.update(mediaType="x"), "is of type 'x', this build reads application/vnd.dev.sigstore"),
        (lambda d: d.pop("mediaType"), "the bundle lacks 'mediaType'"),
        (lambda d: d.update(more=1), "the bundle has an unknown field 'more'"),
        (lambda d: d.update(dsseEnvelope=[]), "'dsseEnvelope' is not an object"),
        (lambda d: d.update(verificationMaterial=1), "'verificationMaterial' is not an object"),
        (material(certificate={}), "is verified by a certificate; only signatures made with a key"),
        (material(x509CertificateChain={}), "is verified by a certificate"),
        (material(timestampVerificationData={}), "is verified by a time stamp"),
        (material(tlogEntries=[{}]), "has entries of a transparency log"),
        (material(publicKey=None), "'publicKey' is not an object"),
        (material(publicKey={"hint": "AB" * 32}), "names its key '(AB)+', expected 64 hex digits"),
        (material(publicKey={"hint": 7}), "names its key 7"),
        (material(publicKey={"raw": ""}), "'publicKey' has an unknown field 'raw'"),
        (envelope(payloadType="text/plain"), "has a payload of type 'text/plain'"),
        (envelope(payload="{}"), "'payload' is not base64"),
        (envelope(payload="e30"), "'payload' is not base64"),
        (envelope(payload="e31="), "'payload' is not canonical base64"),
        (envelope(payload="e30=\n"), "'payload' is not (canonical )?base64"),
        (envelope(payload="é"), "'payload' is not base64"),
        (envelope(payload=None), "'payload' is not base64"),
        (envelope(signatures=[]), "does not hold exactly one signature"),
        (envelope(signatures=[{"sig": ""}] * 2), "does not hold exactly one signature"),
        (envelope(signatures=[{"sig": "", "keyid": 1}]), "has a 'keyid' that is not text"),
        (envelope(signatures=[{"sig": "", "x": 1}]), "the signature has an unknown field 'x'"),
        (envelope(signatures=[""]), "the signature is not an object"),
    ],
)
def test_other_bundles_are_refused(change: Change, reason: str) -> None:
    with pytest.raises(SignatureRefused, match=rf"^model\.sig: {reason}"):
        read_bundle(encoded(change))


@pytest.mark.parametrize(
    ("raw", "reason"),
    [
        (b"", "byte 0: is not valid JSON"),
        (b"[]", "byte 0: is not a JSON object"),
        (b'{"a": 1, "\\u0061": 2}', "duplicate key 'a'"),
        (b'{"a": "\xff"}', "byte 7: is not UTF-8"),
        (b'{"a":' * 600_000, "JSON has more structure than"),
    ],
)
def test_what_is_no_json_object_is_refused(raw: bytes, reason: str) -> None:
    for read in (read_bundle, read_statement):
        with pytest.raises(SignatureRefused, match=rf"^model\.sig: .*{reason}"):
            read(raw)


def test_depth_is_bounded() -> None:
    with pytest.raises(SignatureRefused, match=r"^model\.sig: byte 0: JSON is nested too deeply"):
        read_statement(b'{"a":' * 3000 + b"}" * 3000)


def test_a_bundle_has_a_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    raw = encoded()
    monkeypatch.setattr(bundle_module, "SIGNATURE_LIMIT_BYTES", len(raw) - 1)
    with pytest.raises(SignatureRefused, match=rf"has {len(raw)} bytes, at most {len(raw) - 1} are allowed"):
        read_bundle(raw)


def test_a_statement_is_read_as_it_was_written() -> None:
    written = Statement("m-v1", DIGESTS, follows_symlinks=True)
    assert read_statement(encode_statement(written)) == written
    listed = [entry["name"] for entry in json.loads(statement())["predicate"]["resources"]]
    assert listed == ["a", "b/c", "b.d"], "by components, as the reference sorts"


def test_the_subject_is_the_digest_of_all_digests() -> None:
    raw = b"".join(bytes.fromhex(DIGESTS[name][7:]) for name in ("a", "b/c", "b.d"))
    assert json.loads(statement())["subject"] == [
        {"name": "m-v1", "digest": {"sha256": hashlib.sha256(raw).hexdigest()}}
    ]


def test_what_a_later_predicate_adds_is_ignored() -> None:
    assert read_statement(statement(lambda d: d["predicate"].update(card={}))).files == DIGESTS


def test_what_is_left_out_lies_below_what_is_named() -> None:
    found = read_statement(statement(serialization(ignore_paths=["docs", "x/y"])))
    assert found.ignored == ALWAYS_IGNORED | {"docs", "x/y"}
    assert [path for path in ("docs", "docs/a/b", "x/y", "x/y/z", ".git/x", "model.sig", "model.sig/x")
            if not found.is_ignored(path)] == []  # fmt: skip
    assert [path for path in ("docs2", "x", "x/z", "a/docs", "a/model.sig") if found.is_ignored(path)] == []


def twice(document: dict[str, Any]) -> None:
    document["predicate"]["resources"].append(document["predicate"]["resources"][0])


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda d: d.update(_type="x"), "states 'https://model_signing/signature/v1.0' in 'x'"),
        (lambda d: d.update(predicateType="https://model_signing/Digests/v0.1"), "states '.*Digests/v0.1'"),
        (lambda d: d.update(predicate=[]), "the predicate lacks"),
        (lambda d: d["predicate"].pop("resources"), "the predicate lacks"),
        (lambda d: d.update(more=1), "the statement has an unknown field"),
        (lambda d: d.update(subject=[]), "does not have exactly one subject"),
        (lambda d: d["subject"].append({}), "does not have exactly one subject"),
        (lambda d: d["subject"][0].update(name=3), "the subject's name is not text"),
        (lambda d: d["subject"][0].update(digest={}), "the subject's digest lacks 'sha256'"),
        (lambda d: d["subject"][0]["digest"].update(sha256="0" * 64), "contradicts itself: the subject's"),
        (first(digest="0" * 64), "contradicts itself: the subject's digest"),
        (first(digest="0" * 63), "has for 'a' no digest"),
        (first(digest="AB" * 32), "has for 'a' no digest"),
        (first(digest=7), "has for 'a' no digest"),
        (first(algorithm="blake2"), "has for 'a' no digest of 64 hex digits by 'sha256'"),
        (first(size=3), "a resource has an unknown field 'size'"),
        (first(name=""), "names something that is not a path"),
        (first(name="x" * 5000), "names something that is not a path"),
        (first(name=["a"]), "names something that is not a path"),
        (first(name="/etc/passwd"), "names '/etc/passwd', which is not a plain path below the folder"),
        (first(name="../a"), "names '../a', which is not a plain path"),
        (first(name="b/../a"), "names 'b/../a', which is not a plain path"),
        (first(name="./a"), "names './a', which is not a plain path"),
        (first(name="b//a"), "names 'b//a', which is not a plain path"),
        (first(name="a/"), "names 'a/', which is not a plain path"),
        (first(name="a\0"), "names .*, which is not a plain path"),
        (twice, "names 'a' twice"),
        (lambda d: d["predicate"].update(resources=[]), "'resources' is not a list of 1 to"),
        (lambda d: d["predicate"].update(resources={}), "'resources' is not a list of 1 to"),
        (lambda d: d["predicate"].update(serialization=[]), "'serialization' is not an object"),
        (serialization(method="shards"), "covers 'shards' by 'sha256'; only 'files' by 'sha256'"),
        (serialization(hash_type="blake3"), "covers 'files' by 'blake3'"),
        (serialization(shard_size=1), "'serialization' has an unknown field 'shard_size'"),
        (serialization(allow_symlinks="no"), "'allow_symlinks' or 'ignore_paths' is of the wrong type"),
        (serialization(ignore_paths="a"), "'allow_symlinks' or 'ignore_paths' is of the wrong type"),
        (serialization(ignore_paths=[""]), "leaves out something that is not a path"),
        (serialization(ignore_paths=["."]), "leaves out '.', which is not a plain path"),
        (serialization(ignore_paths=[".."]), "leaves out '..', which is not a plain path"),
        (serialization(ignore_paths=["seal.json"]), "leaves out 'seal.json', which would be loaded"),
        (serialization(ignore_paths=["x", "config.json"]), "leaves out 'config.json', which would be loaded"),
        (serialization(ignore_paths=["a.safetensors"]), "leaves out 'a.safetensors', which would be loaded"),
        (serialization(ignore_paths=["model.safetensors.index.json"]), "leaves out 'model.*', which would"),
    ],
)  # fmt: skip
def test_other_statements_are_refused(change: Change, reason: str) -> None:
    with pytest.raises(SignatureRefused, match=rf"^model\.sig: {reason}"):
        read_statement(statement(change))


def test_base64_has_one_text_for_one_value() -> None:
    """Else two texts of one bundle could be told apart by some readers and not by others."""
    text = base64.b64encode(b"ab").decode()
    for other in (text[:-2] + "J=", text + "====", " " + text, text.rstrip("=")):
        with pytest.raises(SignatureRefused, match="base64"):
            read_bundle(encoded(envelope(payload=other)))
