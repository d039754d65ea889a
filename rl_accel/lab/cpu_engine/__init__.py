"""A small generation engine on a CPU, shared by what runs verl and slime on a laptop. It knows neither of them."""
