"""Profiles: what they hold, and what is told of one that cannot be used."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path

import pytest

from kvfs.tiers import profiles
from kvfs.tiers.profiles import NAMES, Profile, ProfileError

# As the design's table has them: hot rounds and tokens, warm start and group, shards, checkpoint.
TABLE = {
    "gov": (3, 24, 85, 10, 65_536, 600),
    "ecommerce": (1, 12, 75, 5, 131_072, 300),
    "iot": (1, 6, 90, 20, 262_144, 1800),
}


@pytest.mark.parametrize("name", NAMES)
def test_the_profiles_hold_what_was_measured(name: str) -> None:
    profile = profiles.load(name)
    found = (
        profile.hot_rounds, profile.hot_tokens, profile.warm_fill_pct, profile.warm_group,
        profile.shards, profile.checkpoint_seconds,
    )  # fmt: skip
    assert found == TABLE[name]
    assert profile.name == name
    assert 10 <= profile.hot_idle_seconds <= 30
    assert (profile.shard_by == "device_id") == (name == "iot")
    assert (profile.hot_summary_rounds > 0) == (name == "ecommerce")


@pytest.mark.parametrize("name", NAMES)
def test_a_profile_names_every_setting_so_that_it_can_be_copied(name: str, tmp_path: Path) -> None:
    copy = tmp_path / "mine.toml"
    copy.write_text(profiles.text_of(name))
    assert profiles.load(str(copy)) == profiles.load(name)
    for key in asdict(Profile()):
        assert f"\n{key} = " in profiles.text_of(name)


def test_what_a_file_leaves_out_has_its_default(tmp_path: Path) -> None:
    file = tmp_path / "mine.toml"
    file.write_text("warm_idle_seconds = 60\n")
    assert profiles.load(str(file)) == Profile(name="mine", warm_idle_seconds=60.0)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("warm_fil_pct = 80", "warm_fil_pct is not known; known are name, hot_rounds, "),
        ("[warm]\nfill = 3", "warm is not known; known are"),
        ("warm_fill_pct = 100", "warm_fill_pct = 100 must be a whole number from 10 to 99"),
        ("warm_fill_pct = 80.5", "warm_fill_pct = 80.5 must be a whole number from 10 to 99"),
        ("warm_fill_pct = '80'", "warm_fill_pct = '80' must be a whole number from 10 to 99"),
        ("warm_group = true", "warm_group = True must be a whole number from 1 to 1000"),
        ("hot_idle_seconds = nan", "hot_idle_seconds = nan must be a number from 1 to 86400"),
        ("hot_idle_seconds = inf", "hot_idle_seconds = inf must be a number from 1 to 86400"),
        ("ttl_seconds = 60", "ttl_seconds = 60 must be a whole number from 3600 to "),
        ("shards = 0", "shards = 0 must be a whole number from 1 to 16777216"),
        ("shard_by = 'user'", "shard_by = 'user' must be 'session' or 'device_id'"),
        ("shard_by = ['session']", "shard_by = ['session'] must be 'session' or 'device_id'"),
        ("name = 3", "name = 3 must be a text"),
        ("name = ''", "name = '' must be a text"),
        ("name = ", "Invalid value (at "),
    ],
)
def test_what_is_wrong_with_a_file_is_said_with_its_key(
    text: str, message: str, tmp_path: Path
) -> None:
    file = tmp_path / "mine.toml"
    file.write_text(text)
    with pytest.raises(ProfileError) as refused:
        profiles.load(str(file))
    said = str(refused.value)
    assert said.startswith(f"profile {file}: {message}")
    assert "\n" not in said


def test_a_file_that_is_none(tmp_path: Path) -> None:
    (tmp_path / "bytes").write_bytes(b"\xff")
    for chosen, message in [
        ("goverment", "there is no such file, and the profiles by name are gov, ecommerce, iot"),
        (str(tmp_path), "Is a directory"),
        (str(tmp_path / "bytes"), "it is not UTF-8 text"),
    ]:
        with pytest.raises(ProfileError) as refused:
            profiles.load(chosen)
        assert str(refused.value) == f"profile {chosen}: {message}"
