"""Optional features of training, one package each; `kapelle.feature` is their contract. Delete a package and its setting to remove one."""
