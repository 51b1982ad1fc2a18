"""Repack the pinned wheel with the series applied.

    archive     zip files, deterministic, unchanged members copied as they lie
    metadata    METADATA, WHEEL and the file name of a patched wheel
    repack      the steps, from the pinned wheel to the patched one

Imports `vllm_r3.series` and the standard library.
"""
