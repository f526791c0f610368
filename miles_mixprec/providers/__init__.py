"""Where engines come from: URLs that exist, processes of this machine, Ray actors, Modal containers."""
