"""`python -m coterie` is the command `coterie`."""

from coterie_deploy.cli.app import main

if __name__ == "__main__":
    main()
