"""Starting the processes a layout needs."""
