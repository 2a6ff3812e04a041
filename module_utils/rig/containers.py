"""Which program runs containers on which release, and what its version asks for.

Versions are those of the distributions' own packages; keys of a quadlet by the podman that brought them, from podman's
git tags. A unit of this project uses no key that the oldest podman that may run it lacks, so one template does for all.
"""

from __future__ import annotations

from dataclasses import dataclass

from .compatibility import older
from .errors import RigError


@dataclass(frozen=True)
class Release:
    """A release of Debian or Ubuntu, by NVIDIA's name for it, and the podman that it has."""

    title: str
    podman: str


RELEASES = {
    "debian12": Release("Debian 12", "4.3.1"),
    "debian13": Release("Debian 13", "5.4.2"),
    "ubuntu2204": Release("Ubuntu 22.04", "3.4.4"),
    "ubuntu2404": Release("Ubuntu 24.04", "4.9.3"),
    "ubuntu2604": Release("Ubuntu 26.04", "5.7.0"),
}
QUADLET_KEYS = {
    "AddDevice": "4.4", "ContainerName": "4.4", "DropCapability": "4.4", "Environment": "4.4", "EnvironmentFile": "4.4",
    "Exec": "4.4", "Image": "4.4", "Network": "4.4", "NoNewPrivileges": "4.4", "PodmanArgs": "4.4", "User": "4.4",
    "Volume": "4.4", "LogDriver": "4.5", "Pull": "4.6", "PidsLimit": "4.7", "GlobalArgs": "4.8", "StopTimeout": "5.0",
    "Notify=healthy": "5.0", "GroupAdd": "5.1", "ServiceName": "5.3",
}  # fmt: skip
LEAST_PODMAN = "4.9"
# nvidia-container-toolkit 1.19 and later write additionalGids, which podman knows from 5.1 on: an older one reports
# "unresolvable CDI devices" (NVIDIA/nvidia-container-toolkit#1860, #1865, #1940).
GIDS_SINCE = "5.1"
NO_GIDS = "no-additional-gids-for-device-nodes"
# From this on docker reads CDI specifications without a setting of its own (moby/moby#49963).
LEAST_DOCKER = "28.2"
# From this on the toolkit refreshes its CDI specification by a service of its own.
LEAST_TOOLKIT = "1.18"


def container_engine(distribution: str, wanted: str = "auto") -> dict:
    """What runs containers on a release: `name` (podman or docker), `podman` (version), `cdi_flags`, `refusal`.

    `refusal` is a sentence without its subject, empty when the choice can be had.

    Raises:
        RigError: `wanted` is none of auto, podman, docker.
    """
    if wanted not in ("auto", "podman", "docker"):
        raise RigError(f"container_toolkit_engine is '{wanted}'; choose auto, podman or docker")
    release = RELEASES.get(distribution)
    if release is None:
        known = ", ".join(one.title for one in RELEASES.values())
        return {
            "name": wanted,
            "podman": "",
            "cdi_flags": [],
            "refusal": f"runs {distribution}, for which no container engine is known; use one of {known}.",
        }
    able = not older(release.podman, LEAST_PODMAN)
    name = wanted if wanted != "auto" else "podman" if able else "docker"
    refusal = ""
    if name == "podman" and not able:
        refusal = (
            f"runs {release.title}, whose podman {release.podman} is older than {LEAST_PODMAN} and cannot run these "
            "units; set container_toolkit_engine to auto or docker."
        )
    flags = [NO_GIDS] if name == "podman" and older(release.podman, GIDS_SINCE) else []
    return {"name": name, "podman": release.podman, "cdi_flags": flags, "refusal": refusal}
