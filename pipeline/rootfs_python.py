"""Says what a Python is and where it keeps what. Standard library only: any Python may be asked to run this file.

`python -I -B rootfs_python.py` writes one JSON object to stdout.
"""

import json
import os
import platform
import sys
import sysconfig


def certificates_file() -> str:
    """Where its OpenSSL looks for the certificates of authorities; "" for a Python without OpenSSL."""
    try:
        import ssl
    except ImportError:
        return ""
    return ssl.get_default_verify_paths().openssl_cafile


def main() -> None:
    """Of a virtual environment the Python that it was made from, with its own folders for what is installed."""
    base = {"platbase": getattr(sys, "base_exec_prefix", sys.exec_prefix)}
    description = {
        "implementation": platform.python_implementation(),
        "version": platform.python_version(),
        "platform": sys.platform,
        "executable": os.path.realpath(getattr(sys, "_base_executable", None) or sys.executable),
        "prefix": getattr(sys, "base_prefix", sys.prefix),
        "stdlib": sysconfig.get_path("stdlib"),
        "platstdlib": sysconfig.get_path("platstdlib", vars=base),
        "sites": sorted({sysconfig.get_path("purelib"), sysconfig.get_path("platlib")}),
        "scripts": sysconfig.get_path("scripts"),
        "certificates": certificates_file(),
    }
    print(json.dumps(description))


if __name__ == "__main__":
    main()
