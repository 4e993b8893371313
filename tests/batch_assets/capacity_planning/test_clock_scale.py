"""Where seconds and dollars are those of a scaled clock, its scale is named."""

from __future__ import annotations

from batch_assets.capacity_planning.clock_scale import scale_words


def test_a_clock_like_ours_needs_no_words() -> None:
    assert scale_words({}) == scale_words({"local": 1.0, "aws": 1.0}) == ""


def test_providers_of_one_scale_are_named_together() -> None:
    said = scale_words({"sim-west": 60.0, "local": 1.0, "sim-east": 60.0, "slow": 0.5})
    assert said == (
        "simulated clock: slow runs 0.5 × as fast as real time; a second here is 0.5 s there, and is billed as such; "
        "simulated clock: sim-east, sim-west run 60 × as fast as real time; a second here is 60 s there, and is billed "
        "as such"
    )
