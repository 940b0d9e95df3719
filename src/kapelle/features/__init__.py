"""Optional features of training, one package each; `kapelle.settings.feature` says how they are found. Delete a package and its setting to remove one."""
