# Draws surfaces and fits a curve.
gnuplot -e 'set terminal svg; set output "plot.svg"; set isosamples 60; set hidden3d; splot sin(x)*cos(y/3)' 
fit=$(gnuplot -e 'f(x)=a*x*x+b; set fit quiet; set fit logfile "/dev/null"; fit f(x) "<seq 1 3000 | awk '"'{print \$1,\$1*\$1*2+3}'"'" via a,b; print sprintf("%.3f %.3f",a,b)' 2>&1)
echo "$fit $(sha256sum < plot.svg)"
