"""Ray: how flags reach the processes of a job."""
