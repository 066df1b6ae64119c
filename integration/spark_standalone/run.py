"""Runs a job on a Spark cluster of real processes on this machine, and leaves nothing behind.

Starts a standalone master and two workers from the pip package of pyspark, each worker with one
fake GPU, ships cerebro_hydra to them as a zip, and sends `job.py` with spark-submit. The Pythons
of the cluster can't import cerebro_hydra in any other way; that is checked first.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import sysconfig
import tempfile
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

HERE = Path(__file__).resolve().parent
CHECKOUT = HERE.parents[1]

MARK = "CEREBRO_HYDRA_CLUSTER"
"""The mark in the environment of every process that is started here, and of its descendants."""

START_SECONDS = 90.0
STOP_SECONDS = 15.0


class Cluster:
    """Runs a master and workers as child processes, with all files in one temporary folder."""

    def __init__(self, folder: Path, driver_host: str, worker_hosts: list[str]) -> None:
        import pyspark

        sys.path.insert(0, str(CHECKOUT))
        from cerebro_hydra.spark import java

        chosen = java.choose(java.find(os.environ), pyspark.__version__)
        self.folder = folder
        self._mark = uuid.uuid4().hex
        self._driver_host = driver_host
        self._worker_hosts = worker_hosts
        self._spark = Path(pyspark.__file__).parent
        self._children: list[subprocess.Popen[bytes]] = []
        self.python = self._write_python()
        self.environ = {
            "PATH": os.environ["PATH"],
            "HOME": str(folder),
            "JAVA_HOME": str(java.home_for_spark(chosen, pyspark.__version__)),
            "SPARK_HOME": str(self._spark),
            "SPARK_DAEMON_MEMORY": "256m",
            # Seven JVMs live for a minute: Java's second compiler would be half of their work.
            "JDK_JAVA_OPTIONS": "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC",
            "SPARK_NO_DAEMONIZE": "1",
            "PYSPARK_PYTHON": str(self.python),
            "OMP_NUM_THREADS": "1",
            MARK: self._mark,
        }

    def _write_python(self) -> Path:
        """Write a Python that finds all installed packages, but no links to sources."""
        packages = {sysconfig.get_path("purelib"), sysconfig.get_path("platlib")}
        path = self.folder / "python"
        path.write_text(
            "#!/bin/bash\n"
            f"export PYTHONPATH=${{PYTHONPATH:+$PYTHONPATH:}}{':'.join(sorted(packages))}\n"
            f'exec {sys.executable} -S "$@"\n'
        )
        path.chmod(0o755)
        return path

    def package(self) -> Path:
        """Zip the package as docs/cluster.md tells users to."""
        target = self.folder / "cerebro_hydra.zip"
        command = [sys.executable, "-m", "zipfile", "-c", str(target), "cerebro_hydra/"]
        subprocess.run(command, cwd=CHECKOUT, check=True)
        alone = [str(self.python), "-c", "import cerebro_hydra"]
        done = subprocess.run(alone, cwd=self.folder, env=self.environ, capture_output=True)
        if b"No module named 'cerebro_hydra'" not in done.stderr:
            raise SystemExit("the cluster's Python finds cerebro_hydra without the zip")
        return target

    def start(self) -> str:
        """Start master and workers on free ports; return the master's URL once all are there."""
        host = self._driver_host
        master = ["deploy.master.Master", "--host", host, "--port", "0", "--webui-port", "0"]
        log = self._spawn("master", master, {})
        url = self._wait_for(log, r"Starting Spark master at (spark://\S+)")[0]
        for number, host in enumerate(self._worker_hosts):
            bin_folder = self.folder / f"bin-{number}"
            bin_folder.mkdir()
            _script(bin_folder / "nvidia-smi", f"echo {number + 4}")
            discovery = CHECKOUT / "cerebro_hydra" / "spark" / "gpu_discovery.py"
            _script(bin_folder / "gpus", f"exec {sys.executable} {discovery}")
            options = (
                "-Dspark.worker.resource.gpu.amount=1 "
                f"-Dspark.worker.resource.gpu.discoveryScript={bin_folder / 'gpus'}"
            )
            worker = ["deploy.worker.Worker", "--host", host, "--cores", "1", "--memory", "1g"]
            worker += ["--webui-port", "0", "--work-dir", str(self.folder / f"work-{number}"), url]
            environ = {
                "PATH": f"{bin_folder}:{os.environ['PATH']}",
                "SPARK_WORKER_OPTS": options,
                "SPARK_LOCAL_IP": host,
            }
            self._spawn(f"worker-{number}", worker, environ)
        self._wait_for(log, r"Registering worker", times=len(self._worker_hosts))
        return url

    def submit(self, master: str, package: Path, script: Path, *arguments: str) -> int:
        """Send a script to the cluster with spark-submit and return its status."""
        settings = {
            "spark.driver.host": self._driver_host,
            "spark.driver.memory": "512m",
            "spark.executor.memory": "512m",
            "spark.executor.resource.gpu.amount": "1",
            "spark.task.resource.gpu.amount": "1",
            "spark.task.maxFailures": "8",
            "spark.ui.enabled": "false",
            # A path relative to the executor's folder, where Spark puts what --py-files names.
            "spark.executorEnv.PYTHONPATH": package.name,
            "spark.executorEnv.OMP_NUM_THREADS": "1",
            "spark.python.daemon.module": "cerebro_hydra.spark.daemon",
        }
        command = [str(self._spark / "bin" / "spark-submit"), "--master", master]
        for name, value in settings.items():
            command += ["--conf", f"{name}={value}"]
        command += ["--py-files", str(package), str(script), *arguments]
        with open(self.folder / "submit.log", "wb") as log:
            child = self._popen(command, self.environ, log)
            return child.wait()

    def printed(self, pattern: str) -> list[str]:
        """Return the matches in the output of the job, each once."""
        text = (self.folder / "submit.log").read_text(errors="replace")
        return sorted(set(re.findall(pattern, text)))

    def stop(self) -> list[int]:
        """End everything; return the ids of processes that had to be killed."""
        for child in reversed(self._children):
            child.terminate()
        ends = time.monotonic() + STOP_SECONDS
        while time.monotonic() < ends and self._left():
            for child in self._children:
                child.poll()
            time.sleep(0.1)
        killed = self._left()
        for pid in killed:
            os.kill(pid, signal.SIGKILL)
        for child in self._children:
            child.wait()
        return killed

    def _left(self) -> list[int]:
        """Return the living processes that have the mark in their environment."""
        wanted = f"{MARK}={self._mark}".encode()
        found = []
        for entry in Path("/proc").iterdir():
            if entry.name.isdigit():
                try:
                    if wanted in (entry / "environ").read_bytes().split(b"\0"):
                        found.append(int(entry.name))
                except OSError:
                    continue
        return found

    def _spawn(self, name: str, spark_class: list[str], environ: dict[str, str]) -> Path:
        path = self.folder / f"{name}.log"
        program = [str(self._spark / "bin" / "spark-class"), f"org.apache.spark.{spark_class[0]}"]
        with open(path, "wb") as log:
            self._popen([*program, *spark_class[1:]], self.environ | environ, log)
        return path

    def _popen(
        self, command: list[str], environ: dict[str, str], log: IO[bytes]
    ) -> subprocess.Popen[Any]:
        # In a session of their own, ctrl-C reaches this program alone, which ends them in order.
        child = subprocess.Popen(
            command,
            env=environ,
            cwd=self.folder,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        self._children.append(child)
        return child

    def _wait_for(self, log: Path, pattern: str, times: int = 1) -> list[str]:
        ends = time.monotonic() + START_SECONDS
        while len(found := re.findall(pattern, log.read_text(errors="replace"))) < times:
            dead = [child.args for child in self._children if child.poll() is not None]
            if dead or time.monotonic() > ends:
                raise SystemExit(f"the cluster did not start; ended: {dead}; see below")
            time.sleep(0.1)
        return found

    def logs(self) -> str:
        """Return the ends of all logs, those of executors too."""
        files = [*self.folder.glob("*.log"), *self.folder.glob("work-*/app-*/*/stderr")]
        return "\n".join(
            f"--- {path.relative_to(self.folder)}\n{path.read_text(errors='replace')[-6000:]}"
            for path in sorted(files)
        )


def _script(path: Path, body: str) -> None:
    path.write_text(f"#!/bin/bash\n{body}\n")
    path.chmod(0o755)


@contextmanager
def cluster(driver_host: str, worker_hosts: list[str]) -> Iterator[Cluster]:
    """Yield a cluster that is always ended afterwards; on failure print its logs."""
    folder = Path(tempfile.mkdtemp(prefix="cerebro-hydra-cluster-"))
    made = Cluster(folder, driver_host, worker_hosts)
    try:
        yield made
    except BaseException:
        print(made.logs(), file=sys.stderr)
        raise
    finally:
        killed = made.stop()
        shutil.rmtree(folder, ignore_errors=True)
        if killed:
            print(f"had to kill {killed}", file=sys.stderr)


def main() -> int:
    """Run the job on a cluster, print its report, and return 0 if everything was as expected."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    begun = time.monotonic()
    driver_host, *worker_hosts = sys.argv[1:] or ["127.0.0.1", "127.0.0.2", "127.0.0.3"]
    with cluster(driver_host, worker_hosts) as made:
        package = made.package()
        master = made.start()
        print(f"cluster up after {time.monotonic() - begun:.0f} s: {master}", flush=True)
        report = made.folder / "report.json"
        status = made.submit(
            master, package, HERE / "job.py", str(made.folder / "store"), str(report)
        )
        if status or not report.is_file():
            raise SystemExit(f"spark-submit ended with {status}")
        told = json.loads(report.read_text())
        # The user's function printed on each worker which GPUs CUDA would show it.
        told["cuda_was_shown"] = made.printed(r"GPUS (\d+) PCI_BUS_ID")
        print(json.dumps(told, indent=2))
    print(f"done in {time.monotonic() - begun:.0f} s")
    return 0


if __name__ == "__main__":
    sys.exit(main())
