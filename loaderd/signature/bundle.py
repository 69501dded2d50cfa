"""The outside of `model.sig`: a Sigstore bundle v0.3 around one DSSE envelope.

Nothing in it is to be believed before its signature was checked, so everything that is not known is
refused.  Sources: Sigstore's bundle v0.3, DSSE 1.0 and what model-signing 1.1 writes.
"""

from __future__ import annotations

import base64
import binascii
import json
import re
from dataclasses import dataclass

from loaderd.checkpoint.names import SIGNATURE_FILE, shown
from loaderd.checkpoint.strict_json import parse_object
from shared.errors import CheckpointError, SignatureRefused

SIGNATURE_LIMIT_BYTES = 16 << 20
"""Cap of `model.sig`: room for as many files as a signature may name, with paths of 75 characters."""

_BUNDLE_ENTRIES = 64
"""More than any bundle's outside has; the statement in it is one text."""

MEDIA_TYPE = "application/vnd.dev.sigstore.bundle.v0.3+json"
PAYLOAD_TYPE = "application/vnd.in-toto+json"

_HINT = re.compile(r"[0-9a-f]{64}")
_MATERIALS = {
    "certificate": "a certificate",
    "x509CertificateChain": "a certificate",
    "timestampVerificationData": "a time stamp",
}


@dataclass(frozen=True, slots=True)
class Envelope:
    """What was signed, the signature over it, and whose it claims to be."""

    payload: bytes
    signature: bytes  # ECDSA, DER
    hint: str | None  # hex SHA-256 of the public key's PEM; None in bundles of early tools


def pre_authentication_encoding(payload: bytes) -> bytes:
    """The bytes that are signed (DSSE's PAE): the payload with its type and both lengths."""
    return b"DSSEv1 %d %b %d %b" % (len(PAYLOAD_TYPE), PAYLOAD_TYPE.encode(), len(payload), payload)


def encode_bundle(envelope: Envelope) -> bytes:
    """The text of `model.sig`."""
    document = {
        "mediaType": MEDIA_TYPE,
        "verificationMaterial": {"publicKey": {"hint": envelope.hint}, "tlogEntries": []},
        "dsseEnvelope": {
            "payload": base64.b64encode(envelope.payload).decode("ascii"),
            "payloadType": PAYLOAD_TYPE,
            "signatures": [{"sig": base64.b64encode(envelope.signature).decode("ascii"), "keyid": ""}],
        },
    }
    return json.dumps(document, separators=(",", ":")).encode("ascii") + b"\n"


def read_bundle(raw: bytes) -> Envelope:
    """Parse `model.sig`; raises SignatureRefused if it is malformed or is not a bundle of one key."""
    if len(raw) > SIGNATURE_LIMIT_BYTES:
        raise refusal(f"has {len(raw)} bytes, at most {SIGNATURE_LIMIT_BYTES} are allowed")
    bundle = json_object(raw, entries=_BUNDLE_ENTRIES)
    members(bundle, "the bundle", required=("mediaType", "verificationMaterial", "dsseEnvelope"))
    if bundle["mediaType"] != MEDIA_TYPE:
        raise refusal(f"is of type {_show(bundle['mediaType'])}, this build reads {MEDIA_TYPE}")
    envelope = members(
        bundle["dsseEnvelope"], "'dsseEnvelope'", required=("payload", "payloadType", "signatures")
    )
    if envelope["payloadType"] != PAYLOAD_TYPE:
        raise refusal(f"has a payload of type {_show(envelope['payloadType'])}, expected {PAYLOAD_TYPE}")
    signatures = envelope["signatures"]
    if not isinstance(signatures, list) or len(signatures) != 1:
        raise refusal("does not hold exactly one signature")
    signature = members(signatures[0], "the signature", required=("sig",), optional=("keyid",))
    if not isinstance(signature.get("keyid", ""), str):
        raise refusal("has a 'keyid' that is not text")
    return Envelope(
        _decoded(envelope["payload"], "'payload'"),
        _decoded(signature["sig"], "'sig'"),
        _hint(bundle["verificationMaterial"]),
    )


def refusal(reason: str) -> SignatureRefused:
    """An error about the signature file itself."""
    return SignatureRefused(reason, file=SIGNATURE_FILE)


def json_object(raw: bytes, *, entries: int) -> dict[str, object]:
    """A JSON object without ambiguities and with no more structure than so many entries need; raises
    SignatureRefused."""
    try:
        return parse_object(raw, file=SIGNATURE_FILE, entries=entries)
    except CheckpointError as error:
        raise SignatureRefused(error.reason, file=SIGNATURE_FILE, byte=error.byte) from error


def members(
    value: object, where: str, *, required: tuple[str, ...], optional: tuple[str, ...] = ()
) -> dict[str, object]:
    """`value` as an object that has all the required members and none that is not named."""
    if not isinstance(value, dict):
        raise refusal(f"{where} is not an object")
    for name in required:
        if name not in value:
            raise refusal(f"{where} lacks {name!r}")
    for name in value:
        if name not in required and name not in optional:
            raise refusal(f"{where} has an unknown field {shown(name)!r}")
    return value


def _hint(value: object) -> str | None:
    if isinstance(value, dict):
        for name, meaning in _MATERIALS.items():
            if name in value:
                raise refusal(f"is verified by {meaning}; only signatures made with a key are accepted")
    material = members(value, "'verificationMaterial'", required=("publicKey",), optional=("tlogEntries",))
    if material.get("tlogEntries", []) != []:
        raise refusal("has entries of a transparency log; only signatures made with a key are accepted")
    key = members(material["publicKey"], "'publicKey'", required=(), optional=("hint",))
    hint = key.get("hint")
    if hint is not None and (not isinstance(hint, str) or not _HINT.fullmatch(hint)):
        raise refusal(f"names its key {_show(hint)}, expected 64 hex digits")
    return hint


def _decoded(value: object, where: str) -> bytes:
    """Canonical base64: one text for one value."""
    if not isinstance(value, str) or not value.isascii():
        raise refusal(f"{where} is not base64")
    try:
        raw = base64.b64decode(value, validate=True)
    except binascii.Error:
        raise refusal(f"{where} is not base64") from None
    # Of what the decoder takes, only the length and the unused bits of the last group are free.
    last = base64.b64encode(raw[-(len(raw) % 3 or 3) :]).decode("ascii")
    if len(value) != 4 * -(-len(raw) // 3) or value[-4:] != last:
        raise refusal(f"{where} is not canonical base64")
    return raw


def _show(value: object) -> str:
    return shown(repr(value)[:100])
