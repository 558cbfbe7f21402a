"""What every test shares: one torch thread, one seed, and the way to the data outside the repository."""

from __future__ import annotations

from pathlib import Path

import hypothesis
import pytest
import torch

torch.set_num_threads(1)

# A shared, slow machine says nothing about the code: property tests have no time limit.
hypothesis.settings.register_profile("patient", deadline=None, suppress_health_check=[hypothesis.HealthCheck.too_slow])
hypothesis.settings.load_profile("patient")


@pytest.fixture(autouse=True)
def _seed() -> None:
    """A test's random numbers do not depend on the tests that ran before it."""
    torch.manual_seed(0)


@pytest.fixture(scope="session")
def shared_data_dir() -> Path:
    """The folder of trained networks and images; a test that asks for it skips where there is none."""
    import shared_data

    try:
        return shared_data.directory()
    except FileNotFoundError as error:
        pytest.skip(str(error))
