"""Token files as people have them, one module per format. Reading only; nothing is loaded that is not asked for."""
