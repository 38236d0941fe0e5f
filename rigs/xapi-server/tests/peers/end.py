"""Prints how an answer without a length ends: with a TLS close message, or cut off.

Arguments: the URL of the answer. Prints a line of JSON. curl does not distinguish the two cases.
"""
import json
import socket
import ssl
import sys
import urllib.parse

url = urllib.parse.urlsplit(sys.argv[1])
context = ssl.create_default_context()
context.check_hostname = False
context.verify_mode = ssl.CERT_NONE
# By default Python lets OpenSSL treat both cases alike, as old versions of OpenSSL did.
context.options &= ~getattr(ssl, "OP_IGNORE_UNEXPECTED_EOF", 1 << 7)
plain = socket.create_connection((url.hostname, url.port))
stream = context.wrap_socket(plain, suppress_ragged_eofs=False)
stream.sendall(f"GET {url.path}?{url.query} HTTP/1.1\r\nHost: {url.netloc}\r\n\r\n".encode())
answer = bytearray()
end = "goodbye"
try:
    while piece := stream.recv(1 << 16):
        answer += piece
except ConnectionResetError:
    end = "cut"
except ssl.SSLError as error:
    # Not every version of Python has a separate exception for this.
    if "EOF" not in (error.reason or ""):
        raise
    end = "cut"
head, body = bytes(answer).split(b"\r\n\r\n", 1)
print(json.dumps({"status": int(head.split()[1]), "bytes": len(body), "end": end}))
