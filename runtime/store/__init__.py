"""Where models come from and where they live on this machine."""
