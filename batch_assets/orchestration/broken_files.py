"""A file of datasets that cannot be used, as Dagster shows it: an asset that says what is wrong, and a failed check.

No postponed annotations in modules with Dagster decorators: Dagster reads the classes of config and resources.
"""

import hashlib
from collections.abc import Mapping, Sequence

import dagster as dg

from batch_assets.spec.discovery import BrokenFile

CHECK = "can_be_used"
SECONDS = 30


def broken_definitions(broken: Sequence[BrokenFile], going_on: Mapping[str, Sequence[str]]) -> dg.Definitions:
    """One asset with its check for each broken file, and the sensor that reports the checks.

    `going_on`: by the name of a broken file, its datasets whose last known settings are there.
    """
    if not broken:
        return dg.Definitions()
    return dg.Definitions(
        assets=[_asset(one, going_on.get(one.name, ())) for one in broken],
        asset_checks=[_check(one) for one in broken],
        sensors=[_sensor(broken)],
    )


def broken_key(name: str) -> dg.AssetKey:
    """Asset key of a broken file, by its name."""
    return dg.AssetKey([name, "defs_yaml"])


def _asset(broken: BrokenFile, going_on: Sequence[str]) -> dg.AssetSpec:
    known = "What was asked for before goes on by the last settings that could be used. Its source is not read."
    unknown = "Nothing is made of it until then: no settings of an earlier time are known here."
    return dg.AssetSpec(
        key=broken_key(broken.name),
        group_name=going_on[0] if going_on else broken.name,
        kinds={"yaml"},
        description=f"This file cannot be used:\n\n```\n{broken.error}\n```\n\nAll other datasets are as always. "
        f"{known if going_on else unknown} Mend the file; `batch-assets check {broken.name}` says whether that is "
        "done. Then load the definitions again.",
        metadata={
            "file": dg.MetadataValue.path(str(broken.file)),
            "problems": dg.MetadataValue.json([str(problem) for problem in broken.error.problems]),
        },
    )


def _check(broken: BrokenFile) -> dg.AssetChecksDefinition:
    @dg.asset_check(asset=broken_key(broken.name), name=CHECK, description="The file declares datasets.")
    def check() -> dg.AssetCheckResult:
        return dg.AssetCheckResult(passed=False, description=str(broken.error))

    return check


def _sensor(broken: Sequence[BrokenFile]) -> dg.SensorDefinition:
    signature = hashlib.sha256("\n".join(f"{one.name} {one.error}" for one in broken).encode()).hexdigest()[:16]

    @dg.sensor(
        name="broken_files",
        minimum_interval_seconds=SECONDS,
        default_status=dg.DefaultSensorStatus.RUNNING,
        description="Reports the files of datasets that cannot be used, as failed checks.",
    )
    def sensor(context: dg.SensorEvaluationContext) -> dg.SensorResult:
        said = "; ".join(one.name for one in broken)
        if context.cursor == signature:
            return dg.SensorResult(skip_reason=f"cannot be used: {said}")
        events = [
            dg.AssetCheckEvaluation(
                asset_key=broken_key(one.name), check_name=CHECK, passed=False, description=str(one.error)
            )
            for one in broken
        ]
        return dg.SensorResult(skip_reason=f"cannot be used: {said}", asset_events=events, cursor=signature)

    return sensor
