"""The patch series: read it, turn it into a git tree and back, apply it, check it.

Each imports only those above it, and none imports vLLM, torch or numpy:

    patch           one patch file: message, exact changes; applying it strictly
    folder          the files of patches/v0.N/
    git             git with nobody's configuration
    tree            import and export: git tree <-> folder
    pinned_wheel    find or fetch the wheel, read its Python files
    distinfo        what a patched build says about itself
    installed       patch an installed vLLM, restore it, say what it is
    wheel           the patched wheel
    verify          check the series (import_probe runs on its own)
    upstream        patches to send; the series on another vLLM
"""
