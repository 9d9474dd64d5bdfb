"""The Jupyter server extension: registers kernels and shows the coordinator to browsers and agents."""
