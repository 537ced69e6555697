"""What a run leaves behind about itself: events, values, versions of its inputs, and the pages that show them."""
