"""Carries out `StepPlan`s on the device: prefill calls, the decode step, saves and loads between tiers."""
