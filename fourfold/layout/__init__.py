"""Where everything lies: four degrees, ranks and coordinates, pipe stages. No torch."""
