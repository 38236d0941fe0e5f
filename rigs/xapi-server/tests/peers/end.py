"""Tells how an answer ends that has no length: with the goodbye of TLS, or cut off.

Arguments: the address of the answer. Prints a line of JSON. curl does not tell the two apart.
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
plain = socket.create_connection((url.hostname, url.port))
stream = context.wrap_socket(plain, suppress_ragged_eofs=False)
stream.sendall(f"GET {url.path}?{url.query} HTTP/1.1\r\nHost: {url.netloc}\r\n\r\n".encode())
answer = bytearray()
end = "goodbye"
try:
    while piece := stream.recv(1 << 16):
        answer += piece
except (ssl.SSLEOFError, ConnectionResetError):
    end = "cut"
head, body = bytes(answer).split(b"\r\n\r\n", 1)
print(json.dumps({"status": int(head.split()[1]), "bytes": len(body), "end": end}))
