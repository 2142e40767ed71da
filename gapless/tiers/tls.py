"""TLS between peers of different machines: each shows a certificate, signed by an authority that the other trusts."""

from __future__ import annotations

import ssl

from gapless.base.errors import ConfigError
from gapless.base.peers import PeerFiles


def tls_of(files: PeerFiles | None, gives: bool) -> ssl.SSLContext | None:
    """Return what the connections of one side need; None where there is no TLS. Raises ConfigError naming the file."""
    if files is None:
        return None
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER if gives else ssl.PROTOCOL_TLS_CLIENT)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.verify_mode = ssl.CERT_REQUIRED
    where = f"kv_peer_ssl_certfile {files.certfile} with kv_peer_ssl_keyfile {files.keyfile}"
    try:
        context.load_cert_chain(files.certfile, files.keyfile, password="")  # never asked for at a terminal
        where = f"kv_peer_ssl_ca_certs {files.ca_certs}"
        context.load_verify_locations(files.ca_certs)
    except OSError as error:
        raise ConfigError(f"{where} cannot be used: {error.strerror or error}") from error
    return context
