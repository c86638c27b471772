"""What the scripts share: data folders, settings, whole files, and fast.py, the numbers of model.py quicker."""
