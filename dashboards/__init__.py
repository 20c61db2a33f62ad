"""Live and replayed views of goodput, placements and replanning decisions."""
