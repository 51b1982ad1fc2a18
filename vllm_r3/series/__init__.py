"""The patch series: read it, turn it into a git tree and back, apply it, check it.

Layers, each importing only those above it:

    patchfile, parsing            one patch: message, exact hunks; reading it
    git                           git with nobody's configuration
    pin, folder, hashes           the files of patches/v0.N/
    source                        the pinned wheel and its Python files
    importing, export             git tree <-> folder
    site, transaction, record     an installed vLLM
    stock, versions               its unpatched side, its version
    apply, status                 patch it, restore it, say what it is
    findings, verify, prefixes    check the series (import_probe runs on its own)
    placing, rebase               try it on another vLLM

None of it imports vLLM, torch or numpy.
"""
