"""The address of inferd's API, where it cannot be had."""

from __future__ import annotations

import re
import socket

import pytest
from pydantic import ValidationError

from inferd.config import InferdConfig
from inferd.daemon import _listen
from shared.errors import ConfigError, ResourceError


def test_an_address_in_use_is_for_the_operator_to_settle() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        message = re.escape(f"cannot listen on {address}: Address already in use")
        with pytest.raises(ResourceError, match=message), _listen(address):
            pytest.fail("it listens")


@pytest.mark.parametrize("host", ["a..b", "x" * 64])
def test_a_name_that_no_host_can_have_is_an_error_of_the_configuration(host: str) -> None:
    with pytest.raises(ConfigError, match=f"listen = '{host}:1'"), _listen(f"{host}:1"):
        pytest.fail("it listens")


def test_a_port_that_is_none_is_an_error_of_the_configuration() -> None:
    with pytest.raises(ValidationError, match="at most 65535"):
        InferdConfig(name="a", model="m", listen="127.0.0.1:65536")
    for listen in ("127.0.0.1:65535", "[::1]:8000", "unix:/run/a:99999"):
        assert InferdConfig(name="a", model="m", listen=listen).listen == listen
