"""The patch series: read it, turn it into a git tree and back, apply it, check it.

Layers, each importing only those above it:

    patchfile                     one patch: header, message, exact hunks
    git                           git with nobody's configuration
    pin, folder, hashes           the files of patches/v0.N/
    source                        the pinned wheel and its Python files
    importing, export             git tree <-> folder
    site, transaction, record     an installed vLLM
    apply, status                 patch it, restore it, say what it is
    verify, prefixes, rebase      checks

None of it imports vLLM, torch or numpy.
"""
