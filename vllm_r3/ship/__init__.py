"""Bring the patched vLLM to where it runs.

    labels      what an image says about itself
    overlay     the step of docker/Dockerfile that patches the base
    parts       one byte stream into files of a size, with checksums
    bundle      wheels and an installer for hosts without a network

Imports `vllm_r3.series`, `vllm_r3.wheel` and the standard library.
"""
