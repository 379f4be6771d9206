"""The grid of devices, the layout of tensors on it, and the layers that compute on their parts."""
