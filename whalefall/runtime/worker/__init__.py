# SPDX-License-Identifier: Apache-2.0
"""From a plan to a result: slot tables, batch, forward, sampling.

StepPlan -> tables.py (ids, blocks) -> batch_builder.py -> model_runner.py -> sampling -> step_handle.py -> StepResult
"""
