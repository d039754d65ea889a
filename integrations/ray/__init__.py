"""Adapters for Ray, such as the propagation of flags to the processes of a job."""
