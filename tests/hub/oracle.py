"""The hub's own package on a cache: `oracle.py download|find NAME REVISION CACHE FILES..`

Prints the folder that it finds or downloads; FILES are patterns.
"""

import sys

from huggingface_hub import snapshot_download

what, name, revision, cache, *files = sys.argv[1:]
print(
    snapshot_download(
        name,
        revision=revision,
        cache_dir=cache,
        allow_patterns=files,
        local_files_only=what == "find",
    )
)
