"""The Jupyter server's side: coordination of its host, the REST view, and the provisioner of its kernels."""
