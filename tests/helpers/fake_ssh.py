"""A pretend ssh and sshd: run lines on "hosts" of this machine, over Unix sockets.

`fake_ssh.py serve FOLDER NAME` is the sshd of host NAME; what it starts is no child of
whoever asked, has a bare environment and pipes of its own, and sees the end of its
standard input when the asking side goes, however it goes. Started by `ip netns exec` it
is a host with a network of its own. `fake_ssh.py connect FOLDER NAME LINE` is the ssh.
Needs the standard library alone.
"""

import os
import socket
import struct
import subprocess
import sys
import threading
from pathlib import Path

_HEADER = struct.Struct(">cI")
OUT, ERR, EXIT = b"o", b"e", b"x"


def _receive(sock, count):
    data = b""
    while len(data) < count:
        part = sock.recv(count - len(data))
        if not part:
            raise EOFError
        data += part
    return data


def _serve_one(sock):
    (length,) = struct.unpack(">I", _receive(sock, 4))
    line = _receive(sock, length).decode()
    lock = threading.Lock()
    child = subprocess.Popen(
        ["sh", "-c", line],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env={"PATH": "/usr/bin:/bin", "HOME": "/", "LOGGED_IN": "yes"},
        cwd="/",
        start_new_session=True,
    )

    def send(kind, data):
        try:
            with lock:
                sock.sendall(_HEADER.pack(kind, len(data)) + data)
        except OSError:
            pass  # the asking side is gone

    def pump_out(pipe, kind):
        while data := os.read(pipe.fileno(), 1 << 16):
            send(kind, data)

    def pump_in():
        try:
            while data := sock.recv(1 << 16):
                child.stdin.write(data)
                child.stdin.flush()
        except OSError:
            pass
        try:
            child.stdin.close()
        except OSError:
            pass

    threads = [
        threading.Thread(target=pump_out, args=(child.stdout, OUT), daemon=True),
        threading.Thread(target=pump_out, args=(child.stderr, ERR), daemon=True),
    ]
    for thread in threads:
        thread.start()
    threading.Thread(target=pump_in, daemon=True).start()
    code = child.wait()
    for thread in threads:
        thread.join(1.0)
    send(EXIT, struct.pack(">i", code if code >= 0 else 128 - code))
    sock.close()


def serve(folder, name):
    """The sshd: one thread a connection, until killed."""
    path = Path(folder) / name
    path.unlink(missing_ok=True)
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(path))
        listener.listen(16)
        print("serving", flush=True)
        while True:
            sock, _ = listener.accept()
            threading.Thread(target=_serve_one, args=(sock,), daemon=True).start()


def connect(folder, name, line):
    """The ssh: copies the three streams, returns the exit code."""
    sock = socket.socket(socket.AF_UNIX)
    try:
        sock.connect(str(Path(folder) / name))
    except OSError as error:
        print(f"fake_ssh: connect to host {name}: {error.strerror}", file=sys.stderr)
        return 255
    data = line.encode()
    sock.sendall(struct.pack(">I", len(data)) + data)

    def pump_in():
        while part := os.read(0, 1 << 16):
            sock.sendall(part)
        sock.shutdown(socket.SHUT_WR)

    threading.Thread(target=pump_in, daemon=True).start()
    while True:
        try:
            kind, length = _HEADER.unpack(_receive(sock, _HEADER.size))
            body = _receive(sock, length)
        except (EOFError, ConnectionError):
            print(f"fake_ssh: connection to {name} closed", file=sys.stderr)
            return 255
        if kind == EXIT:
            return struct.unpack(">i", body)[0]
        target = 1 if kind == OUT else 2
        while body:
            body = body[os.write(target, body) :]


if __name__ == "__main__":
    role, *arguments = sys.argv[1:]
    if role == "serve":
        serve(*arguments)
    sys.stdout.flush()
    code = connect(*arguments)
    sys.stderr.flush()
    os._exit(code)  # not waiting for the thread that reads standard input
