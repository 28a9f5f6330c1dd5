"""The manifests: their references exist and their parts are consistent."""

from pathlib import Path

import yaml

from hvdtrain.commands import cli, elastic

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / "launch" / "kubernetes"


def documents(file: str = "mpijob.yaml") -> list[dict]:
    return list(yaml.safe_load_all((FOLDER / file).read_text()))


def pod(role: str) -> dict:
    (job,) = [each for each in documents() if each["kind"] == "MPIJob"]
    return job["spec"]["mpiReplicaSpecs"][role]["template"]["spec"]


def test_launcher_command_exists():
    (container,) = pod("Launcher")["containers"]
    assert (ROOT / container["command"][0]).is_file()
    arguments = container["args"]
    assert arguments[:2] == ["--hostfile", "/etc/mpi/hostfile"]  # written by the operator
    module = arguments.index("hvdtrain")
    assert arguments[module - 2 : module] == ["python", "-m"]
    config = cli.parse("train", arguments[module + 1 :])
    (worker,) = pod("Worker")["containers"]
    mounts = [mount["mountPath"] for mount in worker["volumeMounts"]]
    assert any(str(config.run_dir).startswith(f"{mount}/") for mount in mounts)
    assert worker["image"] == container["image"]


def test_volumes_are_claimed_and_mounted():
    (worker,) = pod("Worker")["containers"]
    volumes = {volume["name"]: volume for volume in pod("Worker")["volumes"]}
    assert {mount["name"] for mount in worker["volumeMounts"]} == volumes.keys()
    claims = {each["metadata"]["name"] for each in documents() if each["kind"] == "PersistentVolumeClaim"}
    named = {v["persistentVolumeClaim"]["claimName"] for v in volumes.values() if "persistentVolumeClaim" in v}
    assert named == claims


def test_terminating_pod_has_time_to_save():
    (worker,) = pod("Worker")["containers"]
    stop = worker["lifecycle"]["preStop"]["exec"]["command"]
    assert stop[:2] == ["sh", "-c"]
    assert "pkill -TERM -f '[p]ython -m hvdtrain'" in stop[2]
    assert min(pod(role)["terminationGracePeriodSeconds"] for role in ("Launcher", "Worker")) >= 120


def test_image_contains_the_checkout():
    text = (FOLDER / "Dockerfile").read_text()
    assert "COPY . /opt/hvdtrain\nWORKDIR /opt/hvdtrain\nRUN launch/run true" in text


def test_parts_of_the_elastic_job_find_each_other():
    found = {(each["kind"], each["metadata"]["name"]): each for each in documents("elastic.yaml")}
    service = found["Service", "hvdtrain-coordinator"]["spec"]
    coordinator = found["Job", "hvdtrain-coordinator"]["spec"]["template"]
    member = found["Deployment", "hvdtrain-member"]["spec"]
    assert service["selector"] == coordinator["metadata"]["labels"]
    assert member["selector"]["matchLabels"] == member["template"]["metadata"]["labels"]
    (coordinates,), (trains,) = coordinator["spec"]["containers"], member["template"]["spec"]["containers"]
    secrets = [{each["name"]: each for each in container["env"]} for container in (coordinates, trains)]
    assert secrets[0]["HVDTRAIN_ELASTIC_TOKEN"] == secrets[1]["HVDTRAIN_ELASTIC_TOKEN"]
    assert coordinates["image"] == trains["image"]
    (port,) = [each["port"] for each in service["ports"]]
    assert coordinates["args"][coordinates["args"].index("--port") + 1] == str(port)
    # launch/run replaces --elastic by the command.
    own, command = elastic.split_command(coordinates["args"][1:])
    assert (own[0], command) == ("2:8", [])
    config = cli.parse("train", trains["args"][3:])
    assert config.job_watch.join == f"hvdtrain-coordinator:{port}"
    volumes = member["template"]["spec"]["volumes"]
    assert [each["name"] for each in trains["volumeMounts"]] == [each["name"] for each in volumes]
    assert ("PersistentVolumeClaim", volumes[0]["persistentVolumeClaim"]["claimName"]) in found
